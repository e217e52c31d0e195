//! containerd's directories of registries, and the file in them that names the mirror.

use std::{
    fs,
    io::{self, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use lazuli_mirror::Identity;

use crate::path_context::PathContext as _;

/// The first line of the file, by which it is known.
const MARK: &str = "# Written by `lazuli setup mirror`. `lazuli setup mirror --undo` removes it.";

/// The directory for registries without one of their own.
const DEFAULT: &str = "_default";

/// Directories as containerd's `config_path` has them. containerd takes the first that has
/// something for a registry, be that the default.
pub(crate) struct HostsDirectories(Vec<PathBuf>);

impl HostsDirectories {
    /// Parses directories that are separated by colons.
    pub(crate) fn new(directories: &str) -> Self {
        let directories = directories.split(':').filter(|directory| !directory.is_empty());
        HostsDirectories(directories.map(PathBuf::from).collect())
    }

    /// Names the mirror for all registries without a directory of their own. Also returns the
    /// directories that there are.
    pub(crate) fn add(
        &self,
        address: SocketAddr,
        identity: &Identity,
    ) -> Result<(PathBuf, Vec<PathBuf>)> {
        let first = self.0.first().context("hosts_dir names no directory")?;
        let directory = first.join(DEFAULT);
        let file = directory.join("hosts.toml");
        let text = text(address, identity);
        match read(&file)? {
            Some(found) if found == text => return Ok((file, self.own()?)),
            Some(found) if found.starts_with(MARK) => {}
            Some(_) => bail!(
                "{} exists already: add the mirror to it, or remove it.\n{text}",
                file.display()
            ),
            None if directory.exists() => bail!(
                "{} exists already, with certificates for all registries: write {} by hand.\n{text}",
                directory.display(),
                file.display()
            ),
            None => {}
        }
        let hidden = self.hidden()?;
        if let Some(one) = hidden.first() {
            bail!(
                "containerd would no longer see {} (and {} more), because it takes {} first: move it to {}",
                one.display(),
                hidden.len() - 1,
                directory.display(),
                first.display()
            );
        }
        write(&file, &text).cannot("write", &file)?;
        Ok((file, self.own()?))
    }

    /// Removes the file of [`HostsDirectories::add`], if it exists and is unchanged.
    pub(crate) fn remove(&self) -> Result<Option<PathBuf>> {
        let Some(first) = self.0.first() else { return Ok(None) };
        let directory = first.join(DEFAULT);
        let file = directory.join("hosts.toml");
        match read(&file)? {
            None => return Ok(None),
            Some(text) if text.starts_with(MARK) => {}
            Some(_) => bail!("{} was not written by `lazuli setup mirror`", file.display()),
        }
        fs::remove_file(&file).cannot("remove", &file)?;
        // Fails when something else is in it.
        let _ = fs::remove_dir(directory);
        Ok(Some(file))
    }

    /// Directories of registries that the default is not for.
    fn own(&self) -> Result<Vec<PathBuf>> {
        self.0.first().map_or_else(|| Ok(Vec::new()), |first| registries(first))
    }

    /// Directories of registries behind the first default.
    fn hidden(&self) -> Result<Vec<PathBuf>> {
        let behind = self.0.iter().skip(1).map(|directory| registries(directory));
        Ok(behind.collect::<Result<Vec<_>>>()?.concat())
    }
}

/// The directories of single registries in `directory`.
fn registries(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.cannot("read", directory)?,
    };
    let mut found: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.file_name() != DEFAULT)
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    Ok(found)
}

/// The file's text. It is for all to read: the key is in a file of root's.
fn text(address: SocketAddr, identity: &Identity) -> String {
    // Rust's debug output of paths is valid TOML, except for characters that no state directory
    // has.
    format!(
        "{MARK}\n\n[host.\"https://{address}\"]\n  capabilities = [\"pull\", \"resolve\"]\n  \
         ca = {:?}\n  client = {:?}\n  dial_timeout = \"1s\"\n",
        identity.ca(),
        identity.client()
    )
}

fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).cannot("read", path),
    }
}

/// containerd may read at any moment, so it sees all of the file or nothing.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory)?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(text.as_bytes())?;
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(readable)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scene {
        root: tempfile::TempDir,
        identity: Identity,
    }

    impl Scene {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let identity = Identity::open(&root.path().join("mirror")).unwrap();
            fs::create_dir_all(root.path().join("certs.d")).unwrap();
            Scene { root, identity }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        fn directories(&self) -> HostsDirectories {
            let [first, second] = ["certs.d", "docker"].map(|name| self.path(name));
            HostsDirectories::new(&format!("{}:{}", first.display(), second.display()))
        }

        fn add(&self, port: u16) -> Result<(PathBuf, Vec<PathBuf>)> {
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            self.directories().add(address, &self.identity)
        }
    }

    #[test]
    fn the_file_names_the_mirror_and_its_certificates() {
        let scene = Scene::new();
        let (file, own) = scene.add(5444).unwrap();
        assert_eq!((&file, own.len()), (&scene.path("certs.d/_default/hosts.toml"), 0));
        let table: toml::Table = fs::read_to_string(&file).unwrap().parse().unwrap();
        let host = &table["host"]["https://127.0.0.1:5444"];
        assert_eq!(host["ca"].as_str(), scene.identity.ca().to_str());
        assert_eq!(host["client"].as_str(), scene.identity.client().to_str());
        // Again, and with another port.
        scene.add(5444).unwrap();
        scene.add(5445).unwrap();
        assert!(fs::read_to_string(&file).unwrap().contains("127.0.0.1:5445"));
        assert_eq!(scene.directories().remove().unwrap(), Some(file.clone()));
        assert!(!file.parent().unwrap().exists());
        assert_eq!(scene.directories().remove().unwrap(), None);
    }

    #[test]
    fn the_operators_files_stay() {
        let scene = Scene::new();
        let file = scene.path("certs.d/_default/hosts.toml");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let error = scene.add(5444).unwrap_err().to_string();
        assert!(error.contains("certificates for all registries"), "{error}");
        fs::write(&file, "server = \"https://mirror.example\"\n").unwrap();
        for error in [scene.add(5444).unwrap_err(), scene.directories().remove().unwrap_err()] {
            assert!(error.to_string().contains("_default/hosts.toml"), "{error}");
        }
        assert!(fs::read_to_string(&file).unwrap().contains("mirror.example"));
    }

    #[test]
    fn registries_with_a_directory_of_their_own_are_listed_or_refused() {
        let scene = Scene::new();
        fs::create_dir_all(scene.path("certs.d/r.example")).unwrap();
        let (_, own) = scene.add(5444).unwrap();
        assert_eq!(own, [scene.path("certs.d/r.example")]);
        scene.directories().remove().unwrap();
        fs::create_dir_all(scene.path("docker/s.example")).unwrap();
        let error = scene.add(5444).unwrap_err().to_string();
        assert!(error.contains("s.example") && error.contains("move it"), "{error}");
    }
}
