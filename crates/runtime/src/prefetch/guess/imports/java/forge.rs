//! Classes, run-time images and archives that tests make up.

use std::io::Write as _;

use flate2::{Compression, write::DeflateEncoder};

use super::{class, jimage};

/// A class with these classes and texts among its constants.
pub(in super::super::super) fn class(classes: &[&str], strings: &[&str]) -> Vec<u8> {
    let all = classes.iter().map(|name| (7, name)).chain(strings.iter().map(|text| (8, text)));
    // A number of eight bytes, which counts twice, and then pairs.
    let mut constants = [&[5][..], &[0; 8]].concat();
    let mut at = 3u16;
    for (tag, text) in all {
        constants.push(1);
        constants.extend((text.len() as u16).to_be_bytes());
        constants.extend(text.as_bytes());
        constants.push(tag);
        constants.extend(at.to_be_bytes());
        at += 2;
    }
    [class::MAGIC, &[0, 0, 0, 61], &at.to_be_bytes(), &constants].concat()
}

/// An image with these classes: module, package, name and content.
pub(in super::super::super) fn image(classes: &[[&str; 3]], contents: &[Vec<u8>]) -> Vec<u8> {
    let mut texts = b"\0class\0".to_vec();
    let (mut offsets, mut locations, mut data) = (Vec::new(), Vec::new(), Vec::new());
    for (names, content) in classes.iter().zip(contents) {
        offsets.extend((locations.len() as u32).to_le_bytes());
        for (kind, name) in (1u8..).zip(names) {
            locations.push(kind << 3 | 1);
            locations.extend((texts.len() as u16).to_be_bytes());
            texts.extend([name.as_bytes(), b"\0"].concat());
        }
        locations.extend([4 << 3, 1]);
        locations.extend([&[5 << 3 | 3][..], &(data.len() as u32).to_be_bytes()].concat());
        locations.extend([&[7 << 3 | 3][..], &(content.len() as u32).to_be_bytes()].concat());
        locations.push(0);
        data.extend(content);
    }
    let (count, sizes) = (classes.len() as u32, [locations.len(), texts.len()]);
    let header = [jimage::MAGIC, 1, 0, count, count, sizes[0] as u32, sizes[1] as u32];
    let header = header.map(u32::to_le_bytes).concat();
    let redirects = vec![0; classes.len() * 4];
    [header, redirects, offsets, locations, texts, data].concat()
}

/// An archive with these files, every other one compressed.
pub(in super::super::super) fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (at, (name, content)) in files.iter().enumerate() {
        let mut stored = content.to_vec();
        if at % 2 == 1 {
            let mut deflated = DeflateEncoder::new(Vec::new(), Compression::default());
            deflated.write_all(content).unwrap();
            stored = deflated.finish().unwrap();
        }
        let method = if at % 2 == 1 { 8u16 } else { 0 };
        let mut header = [&[0; 4], &method.to_le_bytes()[..], &[0; 8]].concat();
        header.extend((stored.len() as u32).to_le_bytes());
        header.extend((content.len() as u32).to_le_bytes());
        header.extend((name.len() as u32).to_le_bytes());
        directory.extend([b"PK\x01\x02\0\0", &header[..], &[0; 10]].concat());
        directory.extend([&(bytes.len() as u32).to_le_bytes(), name.as_bytes()].concat());
        bytes.extend([b"PK\x03\x04", &header[..], name.as_bytes(), &stored].concat());
    }
    let start = bytes.len() as u32;
    bytes.extend(&directory);
    let count = files.len() as u16;
    bytes.extend(
        [b"PK\x05\x06\0\0\0\0", &[count, count].map(u16::to_le_bytes).concat()[..]].concat(),
    );
    bytes.extend([directory.len() as u32, start].map(u32::to_le_bytes).concat());
    bytes.extend([0; 2]);
    bytes
}
