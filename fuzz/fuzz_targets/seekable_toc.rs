//! Errors are fine; panics, hangs and memory out of proportion are bugs, and so is an image that is
//! not sound.
//!
//! The input is a byte that says which format the layers have, and the tables of contents of two
//! layers, with a NUL between them.
#![no_main]

use lazuli_builder::{
    BuildError,
    index::{LayerToc, SeekableImage, assemble_seekable, assemble_seekable_one},
};
use lazuli_image::{
    Algorithm, Stored,
    rafs::{Bootstrap, check},
    seekable::{FrameDigest, SeekableLayer, TocPlace},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((format, tocs)) = data.split_first() else { return };
    let digest = Algorithm::Sha256.digest(b"table");
    let frame = |digest| TocPlace::Frame { offset: 1 << 20, stored_size: 9, size: 9, digest };
    let toc = match format % 3 {
        0 => TocPlace::Member { digest },
        1 => frame(FrameDigest::Stored(digest)),
        _ => frame(FrameDigest::Unpacked(digest)),
    };
    let layer = |(number, table): (u8, &[u8])| {
        let layer = Algorithm::Sha256.digest(&[number]);
        LayerToc {
            layer: SeekableLayer { digest: layer, size: 2 << 20, toc },
            toc: table.to_vec(),
            end: Stored(1 << 20),
        }
    };
    let layers: Vec<_> = (0..2).zip(tocs.splitn(2, |byte| *byte == 0)).map(layer).collect();
    assert_sound(assemble_seekable(&layers));
    assert_sound(assemble_seekable_one(&layers[0]));
});

fn assert_sound(image: Result<SeekableImage, BuildError>) {
    let Ok(SeekableImage { bootstrap, points }) = image else { return };
    let mut bootstrap = Bootstrap::open(bootstrap).expect("what is made can be opened");
    for (blob, points) in points {
        bootstrap.set_points(blob, points).expect("every unit has its point");
    }
    check(&bootstrap).expect("what is made is sound");
    bootstrap.tree().expect("what is made is a tree");
}
