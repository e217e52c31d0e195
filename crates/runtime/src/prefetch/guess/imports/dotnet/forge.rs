//! Assemblies for tests.

/// An assembly that refers to others and calls libraries, with a table of a method before these.
pub(in super::super::super) fn assembly(references: &[&str], libraries: &[&str]) -> Vec<u8> {
    let mut texts = vec![0];
    let mut text = |name: &str| {
        let at = texts.len() as u16;
        texts.extend([name.as_bytes(), b"\0"].concat());
        at.to_le_bytes()
    };
    let method = [&[0; 8][..], &text("Main"), &[0; 4]].concat();
    let libraries_rows: Vec<u8> = libraries.iter().flat_map(|name| text(name)).collect();
    let row = |name: [u8; 2]| [&[0; 14][..], &name, &[0; 4]].concat();
    let references_rows: Vec<u8> = references.iter().flat_map(|name| row(text(name))).collect();
    let valid = (1_u64 << 0x06 | 1 << 0x1a | 1 << 0x23).to_le_bytes();
    let rows = [1, libraries.len() as u32, references.len() as u32].map(u32::to_le_bytes).concat();
    let header = [&[0; 8][..], &valid, &[0; 8], &rows].concat();
    let tables = [header, method, libraries_rows, references_rows].concat();
    let streams = [(&b"#~\0\0"[..], &tables), (b"#Strings\0\0\0\0", &texts)];
    let mut at = 20 + 4 + streams.iter().map(|(name, _)| 8 + name.len()).sum::<usize>();
    let mut root = b"BSJB\x01\0\x01\0\0\0\0\0\x04\0\0\0v4\0\0\0\0\x02\0".to_vec();
    for (name, content) in streams {
        root.extend([at as u32, content.len() as u32].map(u32::to_le_bytes).concat());
        root.extend(name);
        at += content.len();
    }
    root.extend([tables, texts].concat());
    packed(&root)
}

/// A PE file for 32 bits with this metadata, in one section.
fn packed(metadata: &[u8]) -> Vec<u8> {
    /// Where the section is in memory, and in the file: behind headers of 64, 24, 224 and 40 bytes.
    const ADDRESS: u32 = 0x2000;
    const START: usize = 352;
    let section = [&[0; 8][..], &(ADDRESS + 16).to_le_bytes(), &[0; 4], metadata].concat();
    let mut file = b"MZ".to_vec();
    file.resize(60, 0);
    file.extend([&64_u32.to_le_bytes()[..], b"PE\0\0", &[0, 0, 1, 0]].concat());
    file.extend([&[0; 12][..], &224_u16.to_le_bytes(), &[0; 2], &[0x0b, 1]].concat());
    file.resize(64 + 24 + 96 + 14 * 8, 0);
    file.extend(ADDRESS.to_le_bytes());
    file.resize(64 + 24 + 224 + 12, 0);
    file.extend([ADDRESS, section.len() as u32, START as u32].map(u32::to_le_bytes).concat());
    file.resize(START, 0);
    [file, section].concat()
}
