//! The drop-in of containerd's configuration that names the snapshotter and the pods that use it.

use std::{
    fmt::Write as _,
    fs::Permissions,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use clap::ValueEnum;
use lazuli_image::Algorithm;

use crate::{bounded_file, path_context::PathContext as _};

/// containerd reads imports in the order of their names, and the last table of a proxy plugin
/// counts: after `lazuli.toml`, which the package brings.
const NAME: &str = "lazuli_setup.toml";

/// The beginning of the first line, which ends with a digest of the rest of the file.
const MARK: &str =
    "# Written by `lazuli setup containerd`; lines of your own belong in another file. ";

/// The pods that get their images through Lazuli.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pods {
    /// Those whose runtime class has the handler `lazuli`
    Runtime,
    /// All of the node
    All,
}

/// The parameters of the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice<'a> {
    pub(crate) pods: Pods,
    /// The first number of containerd's version.
    pub(crate) major: u32,
    /// The socket of the snapshotter.
    pub(crate) socket: &'a Path,
    /// The state directory.
    pub(crate) root: &'a Path,
    /// Whether containers are in systemd's control groups, as with the node's other runtime.
    pub(crate) systemd_cgroup: bool,
    /// Whether the ids of an image can be mapped.
    pub(crate) maps_ids: bool,
}

/// The result of writing the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// containerd has to read it.
    New(PathBuf),
    /// It was there already.
    Same(PathBuf),
}

/// Writes the file to `directory`.
///
/// # Errors
/// A file of that name that is not as an earlier call has written it.
pub(crate) fn write(directory: &Path, choice: Choice<'_>) -> Result<Written> {
    let path = directory.join(NAME);
    let text = marked(&text(choice));
    match bounded_file::read(&path)? {
        Some(found) if found == text => return Ok(Written::Same(path)),
        Some(found) if !is_ours(&found) => bail!(
            "{} was changed since it was written: move your lines to another file beside it, remove it, and try again",
            path.display()
        ),
        _ => {}
    }
    replace(&path, &text).cannot("write", &path)?;
    Ok(Written::New(path))
}

/// Removes the file of [`write`], if it exists and is unchanged.
pub(crate) fn remove(directory: &Path) -> Result<Option<PathBuf>> {
    let path = directory.join(NAME);
    match bounded_file::read(&path)? {
        None => return Ok(None),
        Some(found) if !is_ours(&found) => {
            bail!("{} was changed since it was written: remove it by hand", path.display())
        }
        Some(_) => {}
    }
    std::fs::remove_file(&path).cannot("remove", &path)?;
    Ok(Some(path))
}

/// The lines that containerd 1.x needs in its main file: an imported file would replace the whole
/// table.
pub(crate) fn lines_for_main(pods: Pods) -> &'static str {
    match pods {
        Pods::All => {
            "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  snapshotter = \"lazuli\"\n  \
             disable_snapshot_annotations = false\n"
        }
        Pods::Runtime => {
            "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  disable_snapshot_annotations = false\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.lazuli]\n  \
             runtime_type = \"io.containerd.runc.v2\"\n  snapshotter = \"lazuli\"\n"
        }
    }
}

fn text(choice: Choice<'_>) -> String {
    let Choice { major, socket, root, maps_ids, .. } = choice;
    let version = if major < 2 { 2 } else { 3 };
    let mut text = format!("version = {version}\n\n[proxy_plugins.lazuli]\n");
    // Rust's debug output of paths is valid TOML.
    let _ = writeln!(text, "  type = \"snapshot\"\n  address = {socket:?}");
    if maps_ids {
        text.push_str("  capabilities = [\"remap-ids\"]\n");
    }
    let _ = writeln!(text, "  [proxy_plugins.lazuli.exports]\n    root = {root:?}");
    text.push_str("    enable_remote_snapshot_annotations = \"true\"\n");
    if major >= 2 {
        text.push_str(&pods(choice));
    }
    text
}

/// Tables of containerd 2, which merges them with those of its other files.
fn pods(choice: Choice<'_>) -> String {
    let images =
        "\n[plugins.\"io.containerd.cri.v1.images\"]\n  disable_snapshot_annotations = false\n";
    match choice.pods {
        Pods::All => format!("{images}  snapshotter = \"lazuli\"\n"),
        Pods::Runtime => format!(
            "{images}[plugins.\"io.containerd.cri.v1.images\".runtime_platforms.lazuli]\n  \
             snapshotter = \"lazuli\"\n\n\
             [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.lazuli]\n  \
             runtime_type = \"io.containerd.runc.v2\"\n  snapshotter = \"lazuli\"\n\
             [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.lazuli.options]\n  \
             SystemdCgroup = {}\n",
            choice.systemd_cgroup
        ),
    }
}

fn marked(text: &str) -> String {
    format!("{MARK}{}\n{text}", Algorithm::Sha256.digest(text.as_bytes()))
}

/// Returns whether the text is unchanged since [`marked`].
fn is_ours(text: &str) -> bool {
    text.split_once('\n').is_some_and(|(_, rest)| marked(rest) == text)
}

/// containerd may read at any moment, so it sees all of the file or nothing.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(directory)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(Permissions::from_mode(0o644))?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(pods: Pods, major: u32) -> Choice<'static> {
        Choice {
            pods,
            major,
            socket: Path::new("/run/lazuli/snapshotter.sock"),
            root: Path::new("/var/lib/lazuli"),
            systemd_cgroup: true,
            maps_ids: true,
        }
    }

    #[test]
    fn the_file_has_what_this_containerd_reads() {
        let table = |pods, major| text(choice(pods, major)).parse::<toml::Table>().unwrap();
        let runtime = table(Pods::Runtime, 2);
        let lazuli =
            &runtime["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]["lazuli"];
        assert_eq!(lazuli["options"]["SystemdCgroup"].as_bool(), Some(true));
        assert_eq!(lazuli["snapshotter"].as_str(), Some("lazuli"));
        let images = &runtime["plugins"]["io.containerd.cri.v1.images"];
        assert!(images.get("snapshotter").is_none());
        let all = table(Pods::All, 2);
        let images = &all["plugins"]["io.containerd.cri.v1.images"];
        assert_eq!(images["snapshotter"].as_str(), Some("lazuli"));
        for table in [&runtime, &all, &table(Pods::All, 1)] {
            let plugin = &table["proxy_plugins"]["lazuli"];
            assert_eq!(plugin["exports"]["root"].as_str(), Some("/var/lib/lazuli"));
            assert_eq!(plugin["capabilities"].as_array().map(Vec::len), Some(1));
        }
        assert!(table(Pods::All, 1).get("plugins").is_none());
        for pods in [Pods::All, Pods::Runtime] {
            lines_for_main(pods).parse::<toml::Table>().unwrap();
        }
    }

    #[test]
    fn lines_of_the_operator_are_never_lost() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("conf.d");
        let path = place.join(NAME);
        let write = |pods| write(&place, choice(pods, 2));
        assert_eq!(write(Pods::All).unwrap(), Written::New(path.clone()));
        assert_eq!(write(Pods::All).unwrap(), Written::Same(path.clone()));
        assert_eq!(write(Pods::Runtime).unwrap(), Written::New(path.clone()));
        let changed = std::fs::read_to_string(&path).unwrap() + "# mine\n";
        std::fs::write(&path, &changed).unwrap();
        for error in [write(Pods::All).unwrap_err(), remove(&place).unwrap_err()] {
            assert!(error.to_string().contains(NAME), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), changed);
        std::fs::remove_file(&path).unwrap();
        write(Pods::All).unwrap();
        assert_eq!(remove(&place).unwrap(), Some(path));
        assert_eq!(remove(&place).unwrap(), None);
    }
}
