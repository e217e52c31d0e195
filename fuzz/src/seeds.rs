//! Writes the first inputs of the fuzz targets to `corpus/`: `cargo run --bin seeds`.

use std::{fs, io};

#[allow(dead_code, reason = "shared with the tests of the crate")]
#[path = "../../crates/image/tests/it/support.rs"]
mod support;

fn main() -> io::Result<()> {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    for target in ["bootstrap", "blob_tail"] {
        fs::create_dir_all(format!("{corpus}/{target}"))?;
    }
    for (name, sample) in [("sample", support::sample()), ("small", support::small_sample())] {
        fs::write(format!("{corpus}/bootstrap/{name}"), &sample.bootstrap)?;
        for (index, blob) in sample.blobs.iter().enumerate() {
            let info = &blob.record.tail;
            let words = [
                info.features,
                info.chunk_count,
                info.ci_stored_size as u32,
                blob.record.blob.codec as u32 | (info.ci_codec as u32) << 8,
                info.ci_offset as u32,
            ];
            let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let tail = &blob.stored[info.ci_offset as usize..];
            fs::write(format!("{corpus}/blob_tail/{name}{index}"), [&head, tail].concat())?;
        }
    }
    Ok(())
}
