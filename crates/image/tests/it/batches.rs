//! Small chunks that are compressed together.

use lazuli_image::{
    BlobIndex, Codec,
    chunk::Part,
    codec::Decoder,
    rafs::{
        BlobRecord, Bootstrap, check, check_blob, check_ci_table, ci_table_of, meta_file,
        place_chunks, written_meta_file,
    },
};

use crate::support::{BlobBuilder, Sample, batched_sample, flatten, small_chunks, without_places};

fn ci(sample: &Sample, blob: usize) -> Vec<u8> {
    let record = &sample.blobs[blob].record;
    ci_table_of(&sample.blobs[blob].stored[record.tail.ci_offset as usize..], &record.tail).unwrap()
}

/// `bootstrap` after `place`.
fn placed(bootstrap: &[u8], tables: &[(BlobIndex, Vec<u8>)]) -> Vec<u8> {
    let mut bootstrap = bootstrap.to_vec();
    let placed = place_chunks(&bootstrap, tables).unwrap();
    bootstrap[placed.at as usize..][..placed.table.len()].copy_from_slice(&placed.table);
    bootstrap
}

#[test]
fn bootstrap_and_tail_say_what_was_written() {
    for codec in [Codec::Zstd, Codec::Lz4, Codec::None] {
        let sample = batched_sample(codec);
        let bootstrap = Bootstrap::open(&sample.bootstrap[..]).unwrap();
        check(&bootstrap).unwrap();
        assert!(flatten(&bootstrap.tree().unwrap()) == flatten(&sample.tree));
        assert_eq!(bootstrap.unplaced(), []);
        for (blob, record) in sample.blobs.iter().zip(bootstrap.blob_records()) {
            assert_eq!(record, blob.record);
            let tail = &blob.stored[record.tail.ci_offset as usize..];
            check_blob(tail, &record).unwrap();
            assert_eq!(meta_file(tail, &record).unwrap(), blob.tail.meta_file);
            assert_eq!(written_meta_file(&record).unwrap(), blob.tail.meta_file);
            let (mut decoder, mut buffer) = (Decoder::new(), Vec::new());
            for chunk in &record.blob.chunks {
                let stored = &blob.stored[chunk.stored.0 as usize..][..chunk.stored_size as usize];
                let unit = decoder.unit(&record.blob.unit(chunk), stored, &mut buffer).unwrap();
                assert!(chunk.digest.matches(chunk.part_of(unit).unwrap()), "{chunk:?}");
            }
        }
    }
}

/// The bytes of the table as upstream's documentation and images have them.
#[test]
fn a_ci_table_of_version_2_has_upstreams_bytes() {
    let mut builder = BlobBuilder::new(Codec::None, small_chunks());
    builder.file(0, b"alone");
    builder.batch(0, &[b"ab", b"cde"]);
    let blob = builder.finish();
    let word = |flags: u64, size: u64, block: u64| flags << 56 | (size - 1) << 32 | block;
    let entries = [[word(0, 5, 0), 5 << 40, 0], [word(5, 2, 1), 5, 0], [word(5, 3, 2), 5, 2]];
    let mut expected: Vec<u8> = entries.concat().iter().flat_map(|w| w.to_le_bytes()).collect();
    expected.extend([5, 0, 0, 0, 5, 0, 0, 0]);
    expected.resize(3 * 24 + 40, 0);
    assert_eq!(blob.record.tail.features, 0x7000_00a5);
    assert_eq!(blob.tail.meta_file[..expected.len()], expected);
    let header = &blob.tail.meta_file[4096..];
    let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
    assert_eq!((word(40), word(48), header[56]), (72, 40, 1));
}

#[test]
fn places_that_a_bootstrap_leaves_out_come_from_the_blob() {
    let sample = batched_sample(Codec::Zstd);
    let bare = without_places(&sample.bootstrap);
    let bootstrap = Bootstrap::open(&bare[..]).unwrap();
    assert_eq!(bootstrap.unplaced(), [BlobIndex(0)]);
    assert!(check(&bootstrap).is_err());
    let table = (BlobIndex(0), ci(&sample, 0));
    assert!(placed(&bare, std::slice::from_ref(&table)) == sample.bootstrap);
    // Nothing is left to do, or nothing can be done.
    assert!(placed(&sample.bootstrap, &[table]) == sample.bootstrap);
    assert!(placed(&bare, &[]) == bare);
}

/// For every changed byte of a table, chunks stay inside their blob and batch, and so does the
/// decoder.
#[test]
fn no_changed_byte_of_a_table_makes_a_reader_panic() {
    let sample = batched_sample(Codec::None);
    let bare = without_places(&sample.bootstrap);
    let good = ci(&sample, 0);
    let record = &sample.blobs[0].record;
    for at in 0..good.len() {
        for value in [0, 0xff, good[at] ^ 1] {
            let mut bad = good.clone();
            bad[at] = value;
            let tables = [(BlobIndex(0), bad)];
            let Ok(changed) = place_chunks(&bare, &tables) else { continue };
            let mut bootstrap = bare.clone();
            bootstrap[changed.at as usize..][..changed.table.len()].copy_from_slice(&changed.table);
            let Ok(bootstrap) = Bootstrap::open(&bootstrap[..]) else { continue };
            for chunk in &bootstrap.blobs()[0].chunks {
                assert!(chunk.stored_end().0 <= record.blob.stored_size, "{chunk:?}");
                assert!(chunk.part_of(&vec![0; chunk.unit_size() as usize]).is_some(), "{chunk:?}");
            }
            let same = check_ci_table(record, &tables[0].1).is_ok();
            let untouched = bootstrap.blobs()[0] == record.blob;
            // A changed reserved byte has no effect; fields that the bootstrap has are not taken
            // from the table.
            assert!(!same || untouched, "byte {at} became {value:#x}");
        }
    }
    for len in [0, good.len() - 1] {
        assert!(place_chunks(&bare, &[(BlobIndex(0), good[..len].to_vec())]).is_err());
    }
}

#[test]
fn refuses_batches_that_cannot_be() {
    let sample = batched_sample(Codec::None);
    let record = &sample.blobs[0].record;
    let first = record.blob.chunks.iter().position(|chunk| chunk.part.is_some()).unwrap();
    type Damage = fn(&mut Part);
    let damages: [(&str, Damage); 4] = [
        ("behind its end", |batch| batch.offset = batch.size),
        ("over the edge of numbers", |batch| batch.offset = u32::MAX),
        ("too big", |batch| batch.size = (16 << 20) + 1),
        ("overlapping", |batch| batch.offset += 1),
    ];
    for (what, damage) in damages {
        let mut blobs: Vec<BlobRecord> =
            sample.blobs.iter().map(|blob| blob.record.clone()).collect();
        damage(blobs[0].blob.chunks[first].part.as_mut().unwrap());
        let written = lazuli_image::rafs::write_bootstrap(&sample.tree, &blobs, &small_chunks());
        assert!(written.is_err(), "{what}");
    }
}
