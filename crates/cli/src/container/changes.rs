//! Upper directories of containers, with the images below them.

use std::path::PathBuf;

use anyhow::{Result, bail};
use lazuli_registry::ImageName;
use lazuli_runtime::daemon::MountStatus;

use crate::{Session, daemon};

/// The files of a container on top of those of its image.
#[derive(Debug)]
pub(crate) struct Written {
    /// The image, by its digest: its tag may mean another one by now.
    pub(crate) image: ImageName,
    /// Upper directories of overlayfs, lowest first.
    pub(crate) layers: Vec<PathBuf>,
}

/// A container known to the daemon, by its engine's name for it.
struct Container<'a> {
    /// For `lazuli run`, the name of its bundle; for containerd, `NAMESPACE/NUMBER/KEY`.
    name: String,
    mount: &'a MountStatus,
    layers: Vec<PathBuf>,
}

/// Finds a container of `lazuli run` or of containerd by its name, or by the beginning of it.
pub(crate) fn find(session: &Session, name: &str) -> Result<Written> {
    let Some(mut daemon) = daemon::connect_if_needed(session)? else {
        bail!("no daemon runs on {}, so no container of it does", session.root.display());
    };
    let mounts = daemon::status(&mut daemon)?.mounts;
    let bundles = session.root.join("run");
    let containers: Vec<_> = mounts.iter().flat_map(|mount| containers(mount, &bundles)).collect();
    let [container] = &matching(&containers, name)[..] else {
        let known: Vec<_> = containers.iter().map(|container| &*container.name).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        bail!("`{name}` is not the name of one container on a lazy image; there are: {known}");
    };
    if container.layers.is_empty() {
        bail!("{}: its user ids are mapped, so its files are not what it sees", container.name);
    }
    let image: ImageName = container.mount.image.parse()?;
    let image = image.pinned_to(container.mount.manifest_digest);
    Ok(Written { image, layers: container.layers.clone() })
}

fn containers<'a>(mount: &'a MountStatus, bundles: &std::path::Path) -> Vec<Container<'a>> {
    let of = |name: &str, layers| Container { name: name.to_owned(), mount, layers };
    let bundle = mount.mountpoint.parent().filter(|bundle| bundle.parent() == Some(bundles));
    let bundle = bundle
        .filter(|_| mount.mountpoint.ends_with("lower"))
        .and_then(|bundle| Some(of(bundle.file_name()?.to_str()?, vec![bundle.join("upper")])));
    let snapshots = mount.snapshot.iter().flat_map(|snapshot| &snapshot.layers);
    bundle.into_iter().chain(snapshots.map(|(name, layers)| of(name, layers.clone()))).collect()
}

/// Those that `name` may mean: exactly, else by its beginning.
fn matching<'a>(containers: &'a [Container<'a>], name: &str) -> Vec<&'a Container<'a>> {
    // Snapshots are NAMESPACE/NUMBER/KEY here, and KEY in containerd's clients.
    let key = |container: &Container<'_>| {
        container.name.splitn(3, '/').last().unwrap_or_default().to_owned()
    };
    let exact = |container: &&Container<'_>| container.name == name || key(container) == name;
    let found: Vec<_> = containers.iter().filter(exact).collect();
    if !found.is_empty() {
        return found;
    }
    let begins = |container: &&Container<'_>| key(container).starts_with(name);
    containers.iter().filter(begins).collect()
}
