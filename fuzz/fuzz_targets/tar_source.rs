//! Errors are fine; panics, hangs and memory out of proportion are bugs. An archive that reads well
//! gives the same entries when it is read again, and stacks or is refused by the overlay.
//!
//! The first two bytes say where the input is cut into a lower and an upper layer. Headers get the
//! checksum they need, which a fuzzer does not find.
#![no_main]

use std::io::{self, Cursor, Read};

use lazuli_builder::{Entry, EntryKind, Layer, LayerSource, merge, source::tar::Archive};
use lazuli_image::Algorithm;
use libfuzzer_sys::fuzz_target;

/// More content than this is not read: what costs nothing in an archive (holes) costs time here.
const CONTENT: u64 = 1 << 20;

fn with_checksums(data: &[u8]) -> Vec<u8> {
    let mut tar = data.to_vec();
    for block in tar.chunks_exact_mut(512) {
        if &block[257..262] == b"ustar" {
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
    tar
}

/// The entries, if the archive reads well and has little content.
fn entries(tar: &[u8]) -> Option<Vec<Entry>> {
    let mut archive = Archive::new(tar);
    let mut entries = Vec::new();
    let mut left = CONTENT;
    while let Some(entry) = archive.next_entry().ok()? {
        if let EntryKind::Regular { size, .. } = entry.kind {
            left = left.checked_sub(size)?;
            let read = io::copy(&mut archive.content(), &mut io::sink()).ok()?;
            assert_eq!(read, size);
        }
        entries.push(entry);
    }
    Some(entries)
}

fuzz_target!(|data: &[u8]| {
    let Some((cut, data)) = data.split_at_checked(2) else { return };
    let cut = usize::from(u16::from_le_bytes([cut[0], cut[1]])) * 512;
    let (low, high) = data.split_at(cut.min(data.len()));
    let mut layers = Vec::new();
    for part in [low, high] {
        let tar = with_checksums(part);
        let Some(found) = entries(&tar) else { return };
        assert_eq!(entries(&tar).as_ref(), Some(&found));
        let reader: Box<dyn Read + Send> = Box::new(Cursor::new(tar));
        layers.push(Layer {
            name: "layer".into(),
            stored_size: None,
            source: LayerSource::Tar(reader),
        });
    }
    if let Ok(merged) = merge(layers, 4096, Algorithm::Blake3, 1, &()) {
        assert!(merged.tree.children(lazuli_image::Tree::ROOT).is_some());
    }
});
