//! The mounts that containerd makes to see a snapshot.

use std::path::Path;

use crate::{
    SnapshotError,
    api::types::Mount,
    directories::Directories,
    mapping::Mapping,
    store::{Kind, Snapshot},
};

/// What the mount of a lazy image shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Its files.
    Files,
    /// Disks for virtual machines.
    Disks,
}

/// How the key ends of a copy in which containerd has changed the owner of every file, as it does
/// for snapshotters that do not map ids.
const COPY: &str = "-remap";

/// The mount of the first of `chain`, on top of the others.
///
/// # Errors
/// The labels of the snapshot map ids in a way that cannot be read.
pub(crate) fn of(
    chain: &[Snapshot],
    directories: &Directories,
    form: Form,
) -> Result<Vec<Mount>, SnapshotError> {
    let [snapshot, parents @ ..] = chain else { return Ok(Vec::new()) };
    // An image's mount shows all of the layers below it.
    let below = parents.iter().position(|parent| parent.image.is_some());
    let parents = &parents[..below.map_or(parents.len(), |image| image + 1)];
    if let (Form::Disks, Some(image)) = (form, below) {
        return on_disk(snapshot, &parents[..image], &parents[image], directories);
    }
    let fs = |snapshot: &Snapshot| text(&directories.fs(snapshot.number));
    let writable = snapshot.kind == Kind::Active;
    let mut options: Vec<_> = mapping(snapshot, parents.first())?
        .map(|mapping| mapping.options())
        .into_iter()
        .flatten()
        .collect();
    let mount = match (writable, parents) {
        (_, []) => bind(fs(snapshot), if writable { "rw" } else { "ro" }, options),
        (false, [parent]) => bind(fs(parent), "ro", options),
        _ => {
            // Without `index`, a directory can be an upper one again after a crash that left its
            // work behind.
            if Path::new("/sys/module/overlay/parameters/index").exists() {
                options.push("index=off".to_owned());
            }
            if writable {
                options.push(format!("workdir={}", text(&directories.work(snapshot.number))));
                options.push(format!("upperdir={}", fs(snapshot)));
            }
            let lowers: Vec<_> = parents.iter().map(fs).collect();
            options.push(format!("lowerdir={}", lowers.join(":")));
            mount("overlay", "overlay".to_owned(), options)
        }
    };
    Ok(vec![mount])
}

/// The mounts of containerd's own EROFS snapshotter for a merged image: first its disks, then an
/// overlay on them, for which containerd's mount manager names the place of the first mount.
/// Runtimes of virtual machines join the disks, give them to the guest and make the overlay there.
///
/// # Errors
/// There are layers with files between the snapshot and the image.
fn on_disk(
    snapshot: &Snapshot,
    between: &[Snapshot],
    image: &Snapshot,
    directories: &Directories,
) -> Result<Vec<Mount>, SnapshotError> {
    if let Some(layer) = between.first() {
        let (name, layer) = (snapshot.name.clone(), layer.name.clone());
        return Err(SnapshotError::FilesOnDisk { name, layer });
    }
    let image = directories.fs(image.number);
    let blobs = (1..).map(|number| image.join(format!("blob-{number}")));
    let blobs = blobs.take_while(|blob| blob.exists());
    let mut options = vec!["ro".to_owned(), "loop".to_owned()];
    options.extend(blobs.map(|blob| format!("device={}", text(&blob))));
    let mut mounts = vec![mount("erofs", text(&image.join("bootstrap")), options)];
    if snapshot.kind == Kind::Active {
        let options = vec![
            format!("workdir={}", text(&directories.work(snapshot.number))),
            format!("upperdir={}", text(&directories.fs(snapshot.number))),
            "lowerdir={{ mount 0 }}".to_owned(),
        ];
        mounts.push(mount("format/mkdir/overlay", "overlay".to_owned(), options));
    }
    Ok(mounts)
}

/// How the ids of the layers below a snapshot have to be mapped, if they have to.
fn mapping(
    snapshot: &Snapshot,
    parent: Option<&Snapshot>,
) -> Result<Option<Mapping>, SnapshotError> {
    if parent.is_some_and(is_copy) { Ok(None) } else { Mapping::of(&snapshot.labels) }
}

/// Returns whether the ids of a snapshot's files have been mapped already.
pub(crate) fn is_copy(snapshot: &Snapshot) -> bool {
    snapshot.key.as_ref().is_some_and(|key| key.ends_with(COPY))
}

fn bind(source: String, access: &str, mut options: Vec<String>) -> Mount {
    options.extend([access.to_owned(), "rbind".to_owned()]);
    mount("bind", source, options)
}

fn mount(kind: &str, source: String, options: Vec<String>) -> Mount {
    Mount { r#type: kind.to_owned(), source, target: String::new(), options }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
