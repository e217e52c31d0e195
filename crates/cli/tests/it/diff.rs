//! Differences between two images.

use std::{
    fs::{self, File, FileTimes, Permissions},
    os::unix::fs::{PermissionsExt as _, chown, symlink},
    path::Path,
    process::Command,
    time::{Duration, SystemTime},
};

use lazuli_testkit::{
    kernel::{Feature, require},
    odd,
};
use serde_json::Value;

use crate::lazuli::Lazuli;

/// Sets the time of everything, deepest first.
fn same_time(path: &Path) {
    if path.is_dir() && !path.is_symlink() {
        fs::read_dir(path).unwrap().for_each(|entry| same_time(&entry.unwrap().path()));
    }
    let touched =
        Command::new("touch").args(["-h", "-d", "@1600000000"]).arg(path).status().unwrap();
    assert!(touched.success());
}

#[test]
fn every_kind_of_change_is_listed() {
    if !require(Feature::Root) {
        return;
    }
    let lazuli = Lazuli::new();
    for side in ["a", "b"] {
        let root = lazuli.directory(side);
        for name in ["content", "mode", "owner", "time", "xattr", "same", "type", "linked"] {
            fs::write(root.join(name), odd::random(name.len() as u64, 3000)).unwrap();
        }
        fs::write(root.join("big"), odd::random(70, 3 << 20)).unwrap();
    }
    let (a, b) = (lazuli.path("a"), lazuli.path("b"));
    fs::create_dir_all(a.join("gone/deep")).unwrap();
    fs::write(a.join("gone/deep/file"), odd::random(99, 5000)).unwrap();
    fs::write(b.join("new"), odd::random(98, 7000)).unwrap();
    fs::write(b.join("content"), odd::random(97, 3000)).unwrap();
    fs::set_permissions(b.join("mode"), Permissions::from_mode(0o4755)).unwrap();
    chown(b.join("owner"), Some(7), Some(8)).unwrap();
    fs::remove_file(b.join("type")).unwrap();
    fs::create_dir(b.join("type")).unwrap();
    symlink("same", b.join("type/inside")).unwrap();
    fs::hard_link(a.join("linked"), a.join("linked-again")).unwrap();
    fs::copy(b.join("linked"), b.join("linked-again")).unwrap();
    rustix::fs::setxattr(b.join("xattr"), "user.x", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    same_time(&a);
    same_time(&b);
    let time = SystemTime::UNIX_EPOCH + Duration::new(1_600_000_000, 1);
    let file = File::options().write(true).open(b.join("time")).unwrap();
    file.set_times(FileTimes::new().set_modified(time)).unwrap();
    for side in ["a", "b"] {
        lazuli.ok(["convert", &format!("dir:{side}"), &format!("oci:lazy:{side}")]);
    }

    let output = lazuli.output(["diff", "oci:lazy:a", "oci:lazy:b"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    let changes: Vec<&str> = text.lines().filter(|line| !line.starts_with([' ', 'o'])).collect();
    assert_eq!(
        changes,
        [
            "~ /content  content (not the same content)",
            "- /gone",
            "- /gone/deep",
            "- /gone/deep/file",
            "~ /linked-again  links (not the same hard links)",
            "~ /mode  mode (mode 0644, 4755)",
            "+ /new",
            "~ /owner  owner (uid 0, 7; gid 0, 8)",
            "~ /time  time (mtime 1600000000.000000000, 1600000000.000000001)",
            "~ /type  mode (mode 0644, 0755), type (file, directory)",
            "+ /type/inside",
            "~ /xattr  xattr (xattrs {}, {user.x=1})",
        ],
        "{text}"
    );

    let json = |a: &str, b: &str| {
        let output = lazuli.output(["diff", a, b, "--json"]);
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), json)
    };
    let (code, report) = json("oci:lazy:a", "oci:lazy:b");
    assert_eq!((code, report["files"].as_array().unwrap().len()), (Some(1), 12));
    assert_eq!(report["files"][0]["change"], "changed");
    assert_eq!(report["files"][7]["what"]["owner"][1], "gid 0, 8");
    // `big` is 3 chunks; of the others, a name's length decides about its content.
    assert_eq!(report["chunks"]["shared"]["chunks"], 3 + 3, "{report:#}");
    assert_eq!(report["chunks"]["only_a"]["chunks"], 1 + 1, "{report:#}");
    assert_eq!(report["chunks"]["only_b"]["chunks"], 2, "{report:#}");
    // B was converted next to A, and uses A's blob for shared content.
    assert_eq!(report["fetch"]["blobs"], 1);
    assert_eq!(report["fetch"]["stored_bytes"], report["chunks"]["only_b"]["stored_bytes"]);

    // Elsewhere, B has its own blob with everything. A node copies the chunks that it has of A.
    lazuli.ok(["convert", "dir:b", "oci:apart:b"]);
    let (_, report) = json("oci:lazy:a", "oci:apart:b");
    assert_eq!(report["chunks"]["shared"]["chunks"], 3 + 3, "{report:#}");
    assert_eq!(report["fetch"]["chunks"], 2, "{report:#}");
    assert_eq!(report["fetch"]["stored_bytes"], report["chunks"]["only_b"]["stored_bytes"]);

    let (code, report) = json("oci:lazy:a", "oci:lazy:a");
    assert_eq!((code, report["files"].as_array().unwrap().len()), (Some(0), 0));
    assert_eq!(report["fetch"]["chunks"], 0);
    let trouble = lazuli.output(["diff", "oci:lazy:a", "oci:lazy:none"]);
    assert_eq!(trouble.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&trouble.stderr).contains("none"));
}
