use lazuli_image::{
    Algorithm, Codec,
    rafs::{blob_tail, check_blob},
};

use crate::support::{BlobBuilder, FinishedBlob, noise, sample, small_chunks};

fn tail_of(blob: &FinishedBlob) -> &[u8] {
    &blob.stored[blob.record.tail.ci_offset as usize..]
}

#[test]
fn tails_agree_with_their_records() {
    for blob in sample().blobs {
        check_blob(tail_of(&blob), &blob.record).unwrap();
        let padded = (16 * blob.record.blob.chunks.len()).next_multiple_of(4096);
        assert_eq!(blob.tail.meta_file.len(), padded + 4096);
    }
}

#[test]
fn big_tables_are_compressed_with_codecs_that_converters_know() {
    for (codec, of_table) in
        [(Codec::None, Codec::None), (Codec::Lz4, Codec::Zstd), (Codec::Zstd, Codec::Zstd)]
    {
        let mut builder = BlobBuilder::new(codec, small_chunks());
        for _ in 0..200 {
            builder.file(0, b"x");
        }
        let blob = builder.finish();
        assert_eq!(blob.record.tail.ci_codec, of_table);
        check_blob(tail_of(&blob), &blob.record).unwrap();
    }
}

#[test]
fn every_changed_byte_and_every_cut_is_noticed_or_harmless() {
    let mut builder = BlobBuilder::new(Codec::Zstd, small_chunks());
    builder.file(0, &noise(0x4000 * 3));
    let blob = builder.finish();
    let mut tail = tail_of(&blob).to_vec();
    for at in 0..tail.len() {
        tail[at] ^= 0x55;
        assert!(check_blob(&tail, &blob.record).is_err(), "byte {at} of {}", tail.len());
        tail[at] ^= 0x55;
        assert!(check_blob(&tail[..at], &blob.record).is_err(), "cut at {at}");
    }
}

#[test]
fn refuses_chunks_that_are_not_packed() {
    let builder = || {
        let mut builder = BlobBuilder::new(Codec::Zstd, small_chunks());
        builder.file(0, &noise(0x4000 * 3));
        builder
    };
    let hasher = || Algorithm::Sha256.hasher();
    type Damage = fn(&mut BlobBuilder);
    let damages: [Damage; 5] = [
        |builder| builder.chunks.clear(),
        |builder| builder.chunks.swap(0, 1),
        |builder| builder.chunks[1].stored.0 += 1,
        |builder| builder.chunks[2].decoded.0 += 4096,
        |builder| builder.chunks[1].number = 7,
    ];
    for (case, damage) in damages.iter().enumerate() {
        let mut builder = builder();
        damage(&mut builder);
        assert!(blob_tail(&builder.chunks, hasher(), Codec::Zstd).is_err(), "case {case}");
    }
}
