//! Errors are fine; panics, hangs and memory out of proportion are bugs. What `check` accepts has a
//! tree, and writing that tree again gives an image of the same content.
#![no_main]

use lazuli_image::{
    erofs::dump,
    rafs::{Bootstrap, BootstrapOptions, check, write_bootstrap},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(bootstrap) = Bootstrap::open(data) else { return };
    let _ = dump(&bootstrap);
    let _ = bootstrap.lookup(bootstrap.root(), b"text");
    let _ = bootstrap.chunks(bootstrap.root());
    let tree = bootstrap.tree();
    let Ok(summary) = check(&bootstrap) else { return };
    let tree = tree.expect("a sound image has a tree");
    let options = BootstrapOptions {
        chunk_size: bootstrap.chunk_size(),
        digest: bootstrap.digest_algorithm(),
    };
    let Ok(again) = write_bootstrap(&tree, &bootstrap.blob_records(), &options) else { return };
    let again = Bootstrap::open(again).expect("what is written can be opened");
    assert_eq!(summary, check(&again).expect("what is written is sound"));
});
