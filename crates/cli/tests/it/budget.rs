//! A cache with a budget: unused blobs are evicted, and mounted images stay.

use std::{fs, path::PathBuf, thread, time::Duration};

use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
};

use crate::lazuli::Lazuli;

const SIZE: usize = 40 << 20;

fn is_right(mountpoint: &str, seed: u64) -> bool {
    fs::read(PathBuf::from(mountpoint).join("file")).unwrap() == odd::random(seed, SIZE)
}

#[test]
fn blobs_that_are_not_mounted_go_and_those_that_are_stay() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let lazuli = Lazuli::new();
    let mounts = [1, 2].map(|seed| {
        let source = lazuli.directory(&format!("source-{seed}"));
        fs::write(source.join("file"), odd::random(seed, SIZE)).unwrap();
        let (source, image) = (format!("dir:source-{seed}"), format!("oci:lazy:{seed}"));
        lazuli.ok(["convert", &source, &image]);
        (image, lazuli.directory(&format!("mnt-{seed}")).to_str().unwrap().to_owned())
    });
    lazuli.configure("[cache]\nmax_bytes = 67108864\n");
    let cache = || lazuli.status()["daemon"]["cache"].clone();
    let [(first, first_at), (second, second_at)] = &mounts;
    lazuli.ok(["mount", first, first_at]);
    assert!(is_right(first_at, 1));
    lazuli.ok(["umount", first_at]);
    assert_eq!(cache()["blobs"], 1, "what is below the budget stays");
    lazuli.ok(["mount", second, second_at]);
    assert!(is_right(second_at, 2));
    for _ in 0..600 {
        if cache()["evicted_blobs"] == 1 {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    let now = cache();
    assert_eq!((&now["evicted_blobs"], &now["blobs"]), (&1.into(), &1.into()), "{now:#}");
    assert!(now["bytes_used"].as_u64() <= now["max_bytes"].as_u64(), "{now:#}");
    // With both mounted there is too much, and nothing of it may go for a minute, in this worker or
    // in the next.
    lazuli.ok(["mount", first, first_at]);
    assert!(is_right(first_at, 1));
    lazuli.kill(lazuli.worker());
    for _ in 0..600 {
        if cache()["over_budget"] == true {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    let now = cache();
    assert_eq!((&now["over_budget"], &now["blobs"]), (&true.into(), &2.into()), "{now:#}");
    assert!(lazuli.ok(["status"]).contains("exceeded"));
    assert!(is_right(first_at, 1) && is_right(second_at, 2));
}
