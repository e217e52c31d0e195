use lazuli_image::{
    Codec,
    codec::{DecodeError, Decoder, Encoder},
};

use crate::support::noise;

#[test]
fn compressible_chunk_round_trips() {
    let mut decoder = Decoder::new();
    for codec in [Codec::Zstd, Codec::Lz4] {
        let mut encoder = Encoder::new(codec, 3).unwrap();
        for len in [100, 4096, 1 << 20, 1 << 24] {
            let text = b"abcdefgh".repeat(len / 8);
            let stored = encoder.encode(&text).unwrap();
            assert!(stored.len() < text.len());
            let mut decoded = vec![0; text.len()];
            decoder.decode(codec, stored, &mut decoded).unwrap();
            assert_eq!(decoded, text);
        }
    }
}

#[test]
fn incompressible_chunk_is_stored_raw() {
    for codec in [Codec::None, Codec::Zstd, Codec::Lz4] {
        let mut encoder = Encoder::new(codec, 3).unwrap();
        for content in [&b""[..], b"a", b"ab", &noise(4096), &noise(1 << 20)] {
            assert_eq!(encoder.encode(content), None, "{codec} {}", content.len());
        }
    }
}

#[test]
fn a_bomb_is_an_error() {
    let stored = Encoder::new(Codec::Zstd, 3).unwrap().encode(&[0; 1 << 24]).unwrap().to_vec();
    let mut decoder = Decoder::new();
    assert!(stored.len() < 4096);
    assert!(matches!(
        decoder.decode(Codec::Zstd, &stored, &mut [0; 4096]),
        Err(DecodeError::Damaged { .. })
    ));
    // The decoder works again after an error.
    let stored = Encoder::new(Codec::Zstd, 3).unwrap().encode(&[1; 4096]).unwrap().to_vec();
    decoder.decode(Codec::Zstd, &stored, &mut [0; 4096]).unwrap();
    for codec in [Codec::None, Codec::Zstd, Codec::Lz4] {
        let stored = match codec {
            Codec::None => vec![1; 10],
            _ => Encoder::new(codec, 3).unwrap().encode(&[1; 4096]).unwrap().to_vec(),
        };
        let error = codec.decode(&stored, &mut [0; 5000]).unwrap_err();
        assert!(matches!(error, DecodeError::Size { expected: 5000, .. }), "{error}");
    }
}
