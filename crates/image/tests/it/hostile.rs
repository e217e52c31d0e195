//! Damaged bootstraps: errors are fine; panics, hangs and unbounded memory are not.

use lazuli_image::rafs::{Bootstrap, check, dump};

use crate::support::{sample, small_sample};

/// Calls everything that reads a bootstrap.
fn read_all(bytes: &[u8]) -> bool {
    let Ok(bootstrap) = Bootstrap::open(bytes) else { return false };
    let sound = check(&bootstrap).is_ok();
    let tree = bootstrap.tree().is_ok();
    let _ = dump(&bootstrap);
    let _ = bootstrap.disk_addresses();
    let _ = bootstrap.lookup(bootstrap.root(), b"text");
    let _ = bootstrap.extent(bootstrap.root(), 0);
    assert!(tree || !sound, "a sound image without a tree");
    sound
}

#[test]
fn no_changed_byte_makes_a_reader_panic() {
    let mut image = small_sample().bootstrap;
    assert!(read_all(&image));
    for at in 0..image.len() {
        let old = image[at];
        // Padding makes most of the image, and no reader looks at it.
        let values: &[u8] = if old == 0 { &[0xff] } else { &[0xff, 0, old ^ 1] };
        for value in values {
            image[at] = *value;
            read_all(&image);
        }
        image[at] = old;
    }
}

#[test]
fn truncated_image_is_refused_at_every_length() {
    let image = sample().bootstrap;
    for len in (0..image.len()).filter(|len| len % 4096 == 0 || len % 61 == 0) {
        assert!(!read_all(&image[..len]), "{len} bytes");
    }
}

#[test]
fn tables_and_superblocks_are_validated() {
    let image = sample().bootstrap;
    let device = 1408;
    let blob_table = 4096;
    let chunk_table = u64::from_le_bytes(image[1152 + 24..1152 + 32].try_into().unwrap()) as usize;
    let cases: &[(usize, &[u8], &str)] = &[
        (0, b"SFAR", "RAFS v5"),
        (1024, &[0], "magic"),
        (1024 + 4, &[1], "checksum"),
        (1024 + 8, &[0, 0, 0, 0], "not a RAFS v6"),
        (1024 + 12, &[9], "tarfs"),
        (1024 + 12, &[13], "block bits"),
        (1024 + 80, &[0x0d], "features 0xd"),
        (1024 + 86, &[3], "3 devices"),
        (1152 + 1, &[3], "tarfs"),
        (1152, &[0x96], "one compressor"),
        (1152, &[0x9c], "one digest"),
        (1152 + 3, &[2], "encryption"),
        (1152 + 20, &[1], "chunk size"),
        (1152 + 8, &[0, 0], "overlap"),
        (1152 + 24, &[0, 0x10, 0], "overlap"),
        (device, b"X", "device tag"),
        (device + 64, &[0xff], "device size"),
        (blob_table, b"X", "blob id"),
        (blob_table + 64, &[1], "bad index"),
        (blob_table + 76, &[2], "gzip chunks"),
        (blob_table + 80, &[1], "bad digest"),
        (blob_table + 84, &[0x29], "an index of a blob"),
        (blob_table + 84, &[0x25], "chunk information size"),
        (blob_table + 84, &[0xa1], "chunk information size"),
        (blob_table + 84, &[0x20], "not aligned to blocks"),
        (blob_table, &[b'x'; 64], "embedded in its blob does not know the blob's id"),
        (blob_table + 85, &[0x01], "encryption"),
        (blob_table + 85, &[0x08], "external"),
        (blob_table + 72, &[9], "chunk information size"),
        (blob_table + 256, &image[blob_table..blob_table + 64], "device tag"),
        (chunk_table + 32, &[7], "blob 7"),
        (chunk_table, &[0; 32], "no digest"),
        (chunk_table + 36, &[2], "a hole in place of a chunk"),
        (chunk_table + 36, &[4], "encryption"),
        (chunk_table + 36, &[8], "has no such units"),
        (chunk_table + 44, &[0, 0, 0, 0], "decoded size"),
        (chunk_table + 44, &[0, 0, 1, 1], "decoded size"),
        (chunk_table + 40, &[0, 0, 0, 0], "stored size"),
        (chunk_table + 55, &[1], "stored end"),
        (chunk_table + 56, &[1], "decoded offset"),
        (chunk_table + 63, &[0xff], "decoded end"),
        (chunk_table + 72, &[0xff], "number"),
    ];
    for (at, bytes, expected) in cases {
        let mut damaged = image.clone();
        damaged[*at..at + bytes.len()].copy_from_slice(bytes);
        let error = Bootstrap::open(damaged).unwrap_err().to_string();
        assert!(error.contains(expected), "byte {at}: `{error}` does not say `{expected}`");
    }
}

/// Without its row in the chunk table a chunk's bytes cannot be checked.
#[test]
fn files_whose_chunks_are_not_listed_are_found() {
    // The extended superblock at 1152 has the size of the chunk table at 32.
    let size_at = 1152 + 32;
    let mut image = small_sample().bootstrap;
    let size = u64::from_le_bytes(image[size_at..size_at + 8].try_into().unwrap());
    for rows in [0, size / 80 - 1] {
        image[size_at..size_at + 8].copy_from_slice(&(rows * 80).to_le_bytes());
        let bootstrap = Bootstrap::open(&image[..]).unwrap();
        assert!(check(&bootstrap).is_err(), "{rows} rows of {}", size / 80);
    }
}

/// `device` is where the first slot of the device table lies, its address behind the name and the
/// size.
#[test]
fn disks_whose_addresses_overlap_are_refused() {
    let image = sample().bootstrap;
    let addresses = Bootstrap::open(&image[..]).unwrap().disk_addresses().unwrap();
    assert!(addresses.len() == 2 && addresses.is_sorted(), "{addresses:?}");
    assert!(addresses.iter().all(|address| address % (512 << 10) == 0), "{addresses:?}");
    let device = 1408;
    for (slot, block) in [(0, 0), (0, 1), (1, 0), (1, addresses[0] as u32 / 4096)] {
        let mut damaged = image.clone();
        let at = device + slot * 128 + 68;
        damaged[at..at + 4].copy_from_slice(&u32::to_le_bytes(block));
        let error = Bootstrap::open(&damaged[..]).unwrap().disk_addresses().unwrap_err();
        let error = error.to_string();
        assert!(error.contains(&format!("device slot {slot}")), "{error}");
        assert!(error.contains("on a disk, expected"), "{error}");
    }
}
