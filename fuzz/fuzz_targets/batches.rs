//! Errors are fine; panics, hangs and memory out of proportion are bugs, and so is a chunk outside
//! of its unit.
//!
//! The input is the size of a bootstrap in 4 bytes, a bootstrap, and the decoded CI table of its
//! first blob.
#![no_main]

use lazuli_image::{
    BlobIndex,
    rafs::{Bootstrap, check_ci_table, place_chunks},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((size, rest)) = data.split_first_chunk() else { return };
    let Some((bootstrap, table)) = rest.split_at_checked(u32::from_le_bytes(*size) as usize) else {
        return;
    };
    let Ok(placed) = place_chunks(bootstrap, &[(BlobIndex(0), table.to_vec())]) else { return };
    let mut bootstrap = bootstrap.to_vec();
    bootstrap[placed.at as usize..][..placed.table.len()].copy_from_slice(&placed.table);
    let Ok(mut bootstrap) = Bootstrap::open(bootstrap) else { return };
    for (blob, points) in placed.points {
        let _ = bootstrap.set_points(blob, points);
    }
    for record in bootstrap.blob_records() {
        let _ = check_ci_table(&record, table);
        for chunk in &record.blob.chunks {
            assert!(chunk.part_of(&vec![0; chunk.unit_size() as usize]).is_some());
        }
    }
});
