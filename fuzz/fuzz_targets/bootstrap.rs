//! Errors are fine; panics, hangs and memory out of proportion are bugs. What `check` accepts has a
//! tree, writing that tree again gives an image of the same content, and merging and ext4 take it
//! or refuse it.
#![no_main]

use lazuli_builder::{SourceImage, TreeOf, combine};
use lazuli_image::{
    Algorithm,
    ext4::{self, Refused},
    rafs::{Bootstrap, BootstrapOptions, check, dump, set_id, write_bootstrap},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // One that was in its blob does not know the blob's id.
    let mut named = data.to_vec();
    let _ = set_id(&mut named, &Algorithm::Sha256.digest(data));
    let Ok(bootstrap) = Bootstrap::open(named) else { return };
    let _ = dump(&bootstrap);
    let _ = bootstrap.disk_addresses();
    let _ = bootstrap.lookup(bootstrap.root(), b"text");
    let _ = bootstrap.chunks(bootstrap.root());
    let tree = bootstrap.tree();
    let across_blobs = bootstrap.file_across_blobs();
    let ext4 = ext4::plan(&bootstrap);
    // With blobs of terabytes most of it is bitmaps.
    if let Ok(plan) = &ext4
        && plan.layout().metadata < 10_000
    {
        plan.write([1; 16], &mut std::io::sink()).expect("what is planned can be written");
    }
    let Ok(summary) = check(&bootstrap) else { return };
    let tree = tree.expect("a sound image has a tree");
    across_blobs.expect("a sound image can be looked through");
    assert!(!matches!(ext4, Err(Refused::Broken(_))), "a sound image is refused: {ext4:?}");
    let options = BootstrapOptions {
        chunk_size: bootstrap.chunk_size(),
        digest: bootstrap.digest_algorithm(),
    };
    for of in [TreeOf::Image, TreeOf::Layer] {
        let part = SourceImage { name: "image".into(), image: &bootstrap, of };
        if let Ok(combined) = combine(&[part]) {
            let _ = combined.bootstrap(&[]);
        }
    }
    let Ok(again) = write_bootstrap(&tree, &bootstrap.blob_records(), &options) else { return };
    let again = Bootstrap::open(again).expect("what is written can be opened");
    assert_eq!(summary, check(&again).expect("what is written is sound"));
});
