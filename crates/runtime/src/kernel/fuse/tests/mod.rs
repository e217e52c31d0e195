//! Real mounts.

use std::{
    fmt::Display,
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

use fuse_backend_rs::api::filesystem::{Context, FileSystem as _, FsOptions, ROOT_ID};
use lazuli_image::{BlobIndex, Decoded, Digest, rafs::Bootstrap};
use lazuli_testkit::{
    kernel::{Feature, require},
    listing,
    oci::Compression,
    odd, packed,
};
use rustix::io::Errno;
use tempfile::TempDir;

use super::{BlobReader, FuseError, ImageFilesystem, MountPoint, MountTarget, Session};
use crate::{
    keeper::Link,
    kernel::mount::{self, Suid},
};

mod successor;

/// Called for a range before its bytes are ready.
type Ensure = dyn Fn(Range<Decoded>) -> io::Result<()> + Send + Sync;

struct Blob {
    file: File,
    ensure: Box<Ensure>,
}

impl BlobReader for Blob {
    fn ensure(&self, blob: BlobIndex, range: Range<Decoded>, _: i32) -> io::Result<()> {
        assert_eq!(blob, BlobIndex(0));
        (self.ensure)(range)
    }

    fn file(&self, _: BlobIndex) -> io::Result<&File> {
        Ok(&self.file)
    }
}

const IMAGE: Digest = Digest::sha256([7; 32]);

struct TestMount {
    session: Session,
    dir: TempDir,
}

impl TestMount {
    fn unmount(&self) {
        until_unused(|| self.session.unmount());
    }
}

/// Retries an unmount: a program that another test starts keeps copies of our open files until it
/// is executed.
fn until_unused<E: Display>(unmount: impl Fn() -> Result<(), E>) {
    let begun = Instant::now();
    while let Err(error) = unmount() {
        assert!(begun.elapsed() < Duration::from_secs(5), "{error}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Mounts an image of the directory `source`.
fn mounted(
    source: &Path,
    ensure: impl Fn(Range<Decoded>) -> io::Result<()> + Send + Sync + 'static,
) -> TestMount {
    mount_at(source, tempfile::tempdir().unwrap(), ensure)
}

/// An image of the directory `source`.
fn filesystem(
    source: &Path,
    ensure: impl Fn(Range<Decoded>) -> io::Result<()> + Send + Sync + 'static,
) -> ImageFilesystem<Vec<u8>, Blob> {
    let image = packed::pack(source).unwrap();
    let bootstrap = Arc::new(Bootstrap::open(image.bootstrap).unwrap());
    let blob = Blob { file: image.decoded, ensure: Box::new(ensure) };
    ImageFilesystem::new(bootstrap, blob).unwrap()
}

fn mount_at(
    source: &Path,
    dir: TempDir,
    ensure: impl Fn(Range<Decoded>) -> io::Result<()> + Send + Sync + 'static,
) -> TestMount {
    let filesystem = filesystem(source, ensure);
    let place =
        MountTarget { mountpoint: dir.path(), key: "test", image: IMAGE, place: MountPoint::Free };
    let session =
        Session::mount(filesystem, place, "an, odd\\ source", Suid::Keep, &Link::alone()).unwrap();
    TestMount { session, dir }
}

fn source_with(files: &[(&str, &[u8])]) -> TempDir {
    let source = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(source.path().join(name), content).unwrap();
    }
    fs::set_permissions(source.path(), fs::Permissions::from_mode(0o755)).unwrap();
    source
}

#[test]
fn odd_trees_come_out_as_they_went_in() {
    if !require(Feature::Root) || !require(Feature::Fuse) || !require(Feature::Program("umoci")) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let image = odd::image().compressed_with(Compression::Gzip);
    image.write_layout(&scratch.path().join("layout"), "odd").unwrap();
    let mut umoci = Command::new("umoci");
    umoci.args(["unpack", "--image", "layout:odd", "bundle"]).current_dir(scratch.path());
    assert!(umoci.output().unwrap().status.success());
    let source = scratch.path().join("bundle/rootfs");
    std::os::unix::net::UnixListener::bind(source.join("types/socket")).unwrap();

    let mounted = mounted(&source, |_| Ok(()));
    // Cold, and once more from the kernel's caches.
    listing::assert_equal(&source, mounted.dir.path());
    listing::assert_equal(&source, mounted.dir.path());
    mounted.unmount();
    assert_eq!(fs::read_dir(mounted.dir.path()).unwrap().count(), 0);
}

#[test]
fn readers_at_once_see_the_same_bytes() {
    if !require(Feature::Fuse) {
        return;
    }
    let content = odd::random(1, 9 << 20);
    let source = source_with(&[("file", &content)]);
    let mounted = mounted(source.path(), |_| Ok(()));
    let file = File::open(mounted.dir.path().join("file")).unwrap();
    thread::scope(|scope| {
        for reader in 0..8 {
            let (file, content) = (&file, &content);
            scope.spawn(move || {
                for step in 0..200 {
                    // Any offset and length, also over chunk borders and the end of the file.
                    let at = (reader * 7919 + step * 104_729) * 31 % content.len();
                    let mut buffer = vec![0; 1 + (at * 13) % 200_000];
                    let expected = &content[at..content.len().min(at + buffer.len())];
                    let mut length = 0;
                    while length < expected.len() {
                        length +=
                            file.read_at(&mut buffer[length..], (at + length) as u64).unwrap();
                    }
                    assert!(&buffer[..length] == expected, "{length} bytes at {at}");
                }
            });
        }
    });
}

#[test]
fn the_kernel_stops_asking_for_attributes_that_no_file_has() {
    if !require(Feature::Fuse) {
        return;
    }
    let source = source_with(&[("file", b"content")]);
    let mounted = mounted(source.path(), |_| Ok(()));
    let file = mounted.dir.path().join("file");
    let ask = || rustix::fs::getxattr(&file, "user.note", &mut [0; 16]);
    let start = Instant::now();
    while ask() != Err(Errno::OPNOTSUPP) {
        assert!(start.elapsed() < Duration::from_secs(10));
    }
    let requests = mounted.session.requests();
    assert_eq!(ask(), Err(Errno::OPNOTSUPP));
    assert_eq!(mounted.session.requests(), requests);
    for buffer in [&mut [][..], &mut [0; 16]] {
        assert_eq!(rustix::fs::listxattr(&file, buffer), Ok(0), "an empty list is no error");
    }
}

/// A file capability, as `setcap cap_net_raw+ep` writes it.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn one_capability_makes_no_request_of_each_file() {
    const FILES: usize = 400;
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let names: Vec<_> = (0..FILES).map(|number| number.to_string()).collect();
    let files: Vec<_> = names.iter().map(|name| (name.as_str(), name.as_bytes())).collect();
    let source = source_with(&files);
    let capability = "security.capability";
    let set = |name, value: &[u8]| {
        let flags = rustix::fs::XattrFlags::CREATE;
        rustix::fs::setxattr(source.path().join("7"), name, value, flags).unwrap();
    };
    set(capability, &CAPABILITY);
    let mounted = mounted(source.path(), |_| Ok(()));
    let root = mounted.dir.path();
    assert!(Command::new("ls").arg("-l").arg(root).output().unwrap().status.success());
    let requests = mounted.session.requests();
    assert!(requests < FILES as u64, "{requests} requests");

    let get = |file: &str, name| {
        let mut value = [0; 100];
        rustix::fs::getxattr(root.join(file), name, &mut value).map(|len| value[..len].to_vec())
    };
    assert_eq!(get("7", capability).unwrap(), CAPABILITY);
    assert_eq!(get("8", capability), Err(Errno::NODATA));
    assert_eq!(get("8", "user.note"), Err(Errno::NODATA));
    for nobodys in ["security.selinux", "system.posix_acl_access", "system.posix_acl_default"] {
        assert_eq!(get("7", nobodys), Err(Errno::OPNOTSUPP), "{nobodys}");
    }
    listing::assert_equal(source.path(), root);
}

/// The kernel takes any other error for a reason to refuse access.
#[test]
fn acl_request_is_answered_with_none() {
    let source = source_with(&[("file", b"content")]);
    rustix::fs::setxattr(
        source.path().join("file"),
        "user.note",
        b"value",
        rustix::fs::XattrFlags::CREATE,
    )
    .unwrap();
    let image = || filesystem(source.path(), |_| Ok(()));
    let ask = |image: &ImageFilesystem<_, _>| {
        let wanted = image.init(FsOptions::all()).unwrap();
        assert!(!wanted.contains(FsOptions::POSIX_ACL));
        let name = c"system.posix_acl_access";
        let answer = image.getxattr(&Context::default(), ROOT_ID, name, 0);
        Errno::from_io_error(&answer.err().unwrap())
    };
    assert_eq!(ask(&image()), Some(Errno::OPNOTSUPP));
    assert_eq!(ask(&image().with_acls_checked()), Some(Errno::NODATA));
}

#[test]
fn a_failed_read_is_an_error_and_only_that() {
    if !require(Feature::Fuse) {
        return;
    }
    let source = source_with(&[("a", b"good"), ("b", b"bad!"), ("c", b"full"), ("d", b"panic")]);
    let image = packed::pack(source.path()).unwrap();
    let mut blob = vec![0; image.decoded_size as usize];
    image.decoded.read_exact_at(&mut blob, 0).unwrap();
    let mounted = mounted(source.path(), move |range| match &blob[range.start.0 as usize..][..4] {
        b"bad!" => Err(io::Error::other("the digest is wrong")),
        b"full" => Err(Errno::NOSPC.into()),
        b"pani" => panic!("as the test wants"),
        _ => Ok(()),
    });
    let errno = |name| fs::read(mounted.dir.path().join(name)).unwrap_err().raw_os_error();
    for _ in 0..3 {
        assert_eq!(errno("b"), Some(Errno::IO.raw_os_error()));
        assert_eq!(errno("c"), Some(Errno::NOSPC.raw_os_error()));
        assert_eq!(errno("d"), Some(Errno::IO.raw_os_error()));
        assert_eq!(fs::read(mounted.dir.path().join("a")).unwrap(), b"good");
    }
}

#[test]
fn waiting_readers_do_not_delay_others() {
    if !require(Feature::Fuse) {
        return;
    }
    const WAITING: usize = 40;
    let names: Vec<_> = (0..WAITING).map(|index| format!("file-{index}")).collect();
    let files: Vec<_> = names.iter().map(|name| (name.as_str(), name.as_bytes())).collect();
    let source = source_with(&files);
    let gate = Arc::new((Mutex::new((0, false)), Condvar::new()));
    let wait = gate.clone();
    let mounted = mounted(source.path(), move |_| {
        let (state, changed) = &*wait;
        let mut state = state.lock().unwrap();
        state.0 += 1;
        changed.notify_all();
        drop(changed.wait_while(state, |(_, open)| !*open).unwrap());
        Ok(())
    });
    let root = mounted.dir.path();
    thread::scope(|scope| {
        let readers: Vec<_> = names
            .iter()
            .map(|name| scope.spawn(move || fs::read(root.join(name)).unwrap()))
            .collect();
        let (state, changed) = &*gate;
        drop(changed.wait_while(state.lock().unwrap(), |(count, _)| *count < WAITING).unwrap());
        // All of them wait for data now.
        assert_eq!(fs::read_dir(root).unwrap().count(), WAITING);
        assert!(fs::metadata(root.join("no such file")).is_err());
        state.lock().unwrap().1 = true;
        changed.notify_all();
        for (reader, name) in readers.into_iter().zip(&names) {
            assert_eq!(reader.join().unwrap(), name.as_bytes());
        }
    });
    mounted.unmount();
}

#[test]
fn an_unused_mount_is_unmounted_and_its_session_ends() {
    if !require(Feature::Root) || !require(Feature::Fuse) {
        return;
    }
    let source = source_with(&[("file", b"content")]);
    let TestMount { session, dir } = mounted(source.path(), |_| Ok(()));
    let file = File::open(dir.path().join("file")).unwrap();
    assert!(matches!(session.unmount(), Err(FuseError::Busy { .. })));
    drop(session);
    // Detached, and still there for the open file.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let mut content = [0; 7];
    file.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(&content, b"content");

    let TestMount { session, dir } = mounted(source.path(), |_| Ok(()));
    assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"content");
    until_unused(|| mount::unmount(dir.path()));
    session.wait();
    assert!(session.requests() > 0);
    // Our mount is gone, so this must not unmount another one.
    let TestMount { session: other, dir: _ } = mount_at(source.path(), dir, |_| Ok(()));
    session.unmount().unwrap();
    drop(session);
    assert_eq!(fs::read(other.mountpoint().join("file")).unwrap(), b"content");
}

/// As root, runs itself once more as a user without any privilege.
#[test]
fn mounts_without_root() {
    if !require(Feature::Fuse) {
        return;
    }
    if rustix::process::geteuid().is_root() {
        // That user may not be able to reach where the test program is. Without udev, /dev/fuse may
        // be for root only.
        let public = source_with(&[]);
        fs::copy(std::env::current_exe().unwrap(), public.path().join("test")).unwrap();
        let script = "mknod -m 666 fuse c 10 229 && mount --bind fuse /dev/fuse && \
            exec setpriv --reuid=65534 --regid=65534 --clear-groups ./test --exact $0 --nocapture";
        let output = Command::new("unshare")
            .args(["--mount", "sh", "-c", script, thread::current().name().unwrap()])
            .env("TMPDIR", "/tmp")
            .current_dir(public.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !text.contains("skipped"), "{text}");
        return;
    }
    let source = source_with(&[("file", b"content"), ("for its owner", b"secret")]);
    let private = source.path().join("for its owner");
    fs::set_permissions(private, fs::Permissions::from_mode(0o400)).unwrap();
    let file = source.path().join("file");
    rustix::fs::lsetxattr(file, "user.note", b"value", rustix::fs::XattrFlags::CREATE).unwrap();
    let mounted = mounted(source.path(), |_| Ok(()));
    listing::assert_equal(source.path(), mounted.dir.path());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.contains(mounted.dir.path().to_str().unwrap()));
    let line = line.unwrap();
    assert!(line.contains(" - fuse.lazuli an,\\040odd\\134\\040source ro,"), "{line}");
    assert!(fs::write(mounted.dir.path().join("file"), "x").is_err());
    mounted.unmount();
    assert_eq!(fs::read_dir(mounted.dir.path()).unwrap().count(), 0);
}
