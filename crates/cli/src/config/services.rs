//! The tables of what the daemon serves beside mounts: containerd and its pulls, and podman.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Component, Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use lazuli_mirror::LazyNames;
use lazuli_runtime::daemon::{DriverChoice, LayerStoreSettings};
use serde::Deserialize;

use super::check;

/// The `[mirror]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Mirror {
    /// A port of the loopback interface.
    pub(crate) listen: SocketAddr,
    /// Repositories whose tags are answered with the lazy form of their image.
    lazy: Vec<String>,
    /// How long manifests are answered after a registry went away; 0 for never.
    stale_while_down_hours: u64,
}

impl Default for Mirror {
    fn default() -> Self {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 5444));
        Mirror { listen, lazy: Vec::new(), stale_while_down_hours: 24 }
    }
}

impl Mirror {
    pub(super) fn check(&self) -> Result<()> {
        let Mirror { listen, stale_while_down_hours: hours, .. } = self;
        if !listen.ip().is_loopback() || listen.port() == 0 {
            bail!("mirror.listen is {listen}, expected a port of 127.0.0.1 or [::1]");
        }
        check("mirror.stale_while_down_hours", Some(*hours), 0..=24)?;
        self.lazy().map(drop)
    }

    /// Tags that are answered with the lazy form of their image.
    pub(crate) fn lazy(&self) -> Result<LazyNames> {
        LazyNames::parse(&self.lazy).context("mirror.lazy")
    }

    /// How long manifests are answered after a registry went away.
    pub(crate) fn stale(&self) -> Duration {
        Duration::from_secs(3600 * self.stale_while_down_hours)
    }
}

/// The `[snapshotter]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Snapshotter {
    /// The Unix socket that containerd connects to.
    pub(crate) address: PathBuf,
    /// The driver for containers' images.
    pub(crate) driver: DriverChoice,
}

impl Default for Snapshotter {
    fn default() -> Self {
        let address = "/run/lazuli/snapshotter.sock".into();
        Snapshotter { address, driver: DriverChoice::Auto }
    }
}

impl Snapshotter {
    pub(super) fn check(&self) -> Result<()> {
        let path = self.address.display();
        if !self.address.is_absolute() {
            bail!("snapshotter.address is {path}, expected an absolute path");
        }
        // Bytes that fit into `sun_path` before the final NUL.
        if self.address.as_os_str().len() > 107 {
            bail!("snapshotter.address is {path}, expected at most 107 bytes");
        }
        if self.driver == DriverChoice::Disks {
            bail!("snapshotter.driver is disks, which containerd's plugin lazuli-vm has by itself");
        }
        Ok(())
    }
}

/// The `[layers]` table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Layers {
    /// Where podman looks for layers, `additionallayerstores` in `storage.conf`. The default
    /// outlives a reboot: podman refuses to start if the directory is missing.
    directory: PathBuf,
    /// The driver for layers.
    driver: DriverChoice,
}

impl Default for Layers {
    fn default() -> Self {
        Layers { directory: "/var/lib/lazuli/layer-store".into(), driver: DriverChoice::Auto }
    }
}

impl Layers {
    pub(super) fn check(&self) -> Result<()> {
        if !self.directory.is_absolute() {
            let path = self.directory.display();
            bail!("layers.directory is {path}, expected an absolute path");
        }
        if self.directory.components().any(|part| part == Component::ParentDir) {
            let path = self.directory.display();
            bail!("layers.directory is {path}, expected a path without ..");
        }
        if self.driver == DriverChoice::Disks {
            bail!("layers.driver is disks, which shows no files: leave it out");
        }
        Ok(())
    }

    /// The settings of a daemon with the state directory `root`.
    ///
    /// # Errors
    /// The directory hides state: a daemon that starts would wait for answers that only itself can
    /// give.
    pub(crate) fn settings(&self, root: &Path) -> Result<LayerStoreSettings> {
        let (parent, name) = (self.directory.parent(), self.directory.file_name());
        let directory = match (parent, name) {
            (Some(parent), Some(name)) => crate::real_path(parent)?.join(name),
            _ => self.directory.clone(),
        };
        let own = root.join("layer-store");
        let hides = root.starts_with(&directory) || directory.starts_with(root);
        if hides && directory != own {
            let (path, root, own) = (self.directory.display(), root.display(), own.display());
            bail!(
                "layers.directory is {path}, which hides files of the state directory {root} or \
                 is hidden among them: expected {own}, or a directory elsewhere"
            );
        }
        Ok(LayerStoreSettings { directory, driver: self.driver })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn an_unknown_driver_is_refused_with_the_known_ones() {
        let driver = |text: &str| toml::from_str::<Config>(&format!("[snapshotter]\n{text}\n"));
        assert_eq!(driver("").unwrap().snapshotter.unwrap().driver, DriverChoice::Auto);
        let fuse = driver("driver = 'fuse'").unwrap().snapshotter.unwrap();
        assert_eq!(fuse.driver, DriverChoice::Fuse);
        let error = driver("driver = 'erofs'").unwrap_err().to_string();
        assert!(error.contains("`auto`, `fanotify`, `loop`, `ext4`, `fuse`"), "{error}");
    }

    #[test]
    fn the_table_turns_the_snapshotter_on() {
        assert!(toml::from_str::<Config>("").unwrap().snapshotter.is_none());
        let config: Config = toml::from_str("[snapshotter]\n").unwrap();
        let address = config.snapshotter.unwrap().address;
        assert_eq!(address, Path::new("/run/lazuli/snapshotter.sock"));
        for address in ["relative.sock".to_owned(), format!("/{}", "x".repeat(107))] {
            let error = Snapshotter { address: address.into(), ..Snapshotter::default() }
                .check()
                .unwrap_err();
            assert!(error.to_string().contains("snapshotter.address"), "{error}");
        }
    }

    #[test]
    fn the_mirror_is_on_the_loopback_interface() {
        let mirror = |text: &str| {
            let config = toml::from_str::<Config>(&format!("[mirror]\n{text}\n")).unwrap();
            config.mirror.unwrap()
        };
        assert!(toml::from_str::<Config>("").unwrap().mirror.is_none());
        let usual = mirror("");
        usual.check().unwrap();
        assert_eq!(usual.listen.to_string(), "127.0.0.1:5444");
        assert_eq!(usual.stale(), Duration::from_secs(24 * 3600));
        mirror("listen = '[::1]:5000'\nlazy = ['*', 'r.example/a']").check().unwrap();
        for (text, key) in [
            ("listen = '0.0.0.0:5444'", "mirror.listen"),
            ("listen = '10.0.0.1:5444'", "mirror.listen"),
            ("listen = '127.0.0.1:0'", "mirror.listen"),
            ("stale_while_down_hours = 25", "mirror.stale_while_down_hours"),
            ("lazy = ['r.example/a:1']", "mirror.lazy"),
        ] {
            let error = format!("{:#}", mirror(text).check().unwrap_err());
            assert!(error.contains(key), "{error}");
        }
    }

    #[test]
    fn the_layer_store_is_off_unless_it_is_named() {
        assert!(toml::from_str::<Config>("").unwrap().layers.is_none());
        let layers = |text: &str| {
            let config: Config = toml::from_str(&format!("[layers]\n{text}\n")).unwrap();
            config.layers.unwrap()
        };
        let root = Path::new("/var/lib/lazuli");
        let settings = layers("").settings(root).unwrap();
        assert_eq!(settings.directory, Path::new("/var/lib/lazuli/layer-store"));
        for (text, problem) in [
            ("directory = 'layers'", "expected an absolute path"),
            ("directory = '/var/../x'", "expected a path without .."),
            ("driver = 'disks'", "shows no files"),
        ] {
            let error = layers(text).check().unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn the_layer_store_hides_no_state() {
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path().canonicalize().unwrap().join("state/lazuli");
        std::fs::create_dir_all(&root).unwrap();
        let link = temporary.path().join("link");
        std::os::unix::fs::symlink(&root, &link).unwrap();
        let settings = |directory: &Path| {
            let layers = Layers { directory: directory.to_owned(), ..Layers::default() };
            layers.check().unwrap();
            layers.settings(&root)
        };
        let beside = root.with_file_name("lazuli-layers");
        for good in [root.join("layer-store"), link.join("layer-store"), beside, "/x/y".into()] {
            settings(&good).unwrap();
        }
        let above = root.parent().unwrap();
        for bad in [
            Path::new("/"),
            above,
            &root,
            &root.join("."),
            &root.join("layers"),
            &root.join("cache/x"),
            &root.join("layer-store/x"),
            &link.join("layers"),
        ] {
            let error = settings(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("layers.directory is {}", bad.display())), "{error}");
            assert!(error.contains("or a directory elsewhere"), "{error}");
        }
    }
}
