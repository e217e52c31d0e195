mod containerd;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use lazuli_mirror::Identity;
use toml::{Table, Value};

use crate::{
    Session, bounded_file,
    mirror::{self, HostsDirectories},
};

/// Tell other programs of this node about Lazuli
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Mirror(MirrorArguments),
    Containerd(containerd::Arguments),
}

/// Have containerd pull through the mirror of this node
///
/// Writes hosts.toml for all registries that have no directory of their own. The configuration
/// needs [mirror], and containerd's needs `config_path`. Takes effect with the next pull.
#[derive(Debug, Args)]
struct MirrorArguments {
    /// Remove the file again
    #[arg(long)]
    undo: bool,
    /// containerd's configuration, which is only read
    #[arg(long, value_name = "FILE", default_value = "/etc/containerd/config.toml")]
    containerd: PathBuf,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    match &arguments.what {
        What::Mirror(arguments) => run_mirror(session, arguments),
        What::Containerd(arguments) => containerd::run(session, arguments),
    }
}

fn run_mirror(session: &Session, arguments: &MirrorArguments) -> Result<()> {
    let directories = HostsDirectories::new(session.config.hosts_directories());
    if arguments.undo {
        match directories.remove()? {
            Some(file) => println!("removed {}", file.display()),
            None => println!("nothing was set up"),
        }
        return Ok(());
    }
    let Some(table) = &session.config.mirror else {
        bail!("the configuration has no [mirror]: add it, and reload the daemon");
    };
    let registries = Registries::read(&arguments.containerd)?;
    if let Some(place) = &registries.mirrors {
        bail!(
            "{place} in {} has mirrors, which containerd does not take together with hosts.toml: \
             move them to hosts.toml",
            arguments.containerd.display()
        );
    }
    let directory = mirror::directory(session);
    let identity = Identity::open(&directory)?;
    let (file, own) = directories.add(table.listen, &identity)?;
    println!("containerd pulls through https://{}, by {}", table.listen, file.display());
    for directory in own {
        println!("not through it, by {}", directory.display());
    }
    if !registries.reads_hosts {
        println!(
            "containerd before 2.2 reads that file only with `config_path = \"{}\"` in its registry table",
            session.config.hosts_directories()
        );
    }
    Ok(())
}

/// The registry settings in containerd's configuration.
#[derive(Debug, Default, PartialEq, Eq)]
struct Registries {
    /// The table in which mirrors are named.
    mirrors: Option<String>,
    /// Whether the table names directories of hosts.toml files.
    reads_hosts: bool,
}

/// Plugins that have a table `registry`: of containerd 1.x, and of 2.x.
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images"];

impl Registries {
    /// Reads a configuration and the files that it imports.
    fn read(path: &Path) -> Result<Self> {
        let mut all = Registries::default();
        let Some(main) = table(path)? else { return Ok(all) };
        let imports = main.get("imports").and_then(Value::as_array).into_iter().flatten();
        let imported: Vec<_> = imports.filter_map(Value::as_str).flat_map(files).collect();
        all.add(&main);
        for path in imported {
            if let Some(table) = table(&path)? {
                all.add(&table);
            }
        }
        Ok(all)
    }

    fn add(&mut self, table: &Table) {
        for plugin in PLUGINS {
            let registry = table.get("plugins").and_then(|plugins| plugins.get(plugin));
            let Some(registry) = registry.and_then(|plugin| plugin.get("registry")) else {
                continue;
            };
            let mirrors = registry.get("mirrors").and_then(Value::as_table);
            if mirrors.is_some_and(|mirrors| !mirrors.is_empty()) {
                self.mirrors = Some(format!("[plugins.\"{plugin}\".registry.mirrors]"));
            }
            let config_path = registry.get("config_path").and_then(Value::as_str);
            self.reads_hosts |= config_path.is_some_and(|path| !path.is_empty());
        }
    }
}

/// A file's content, if there is one.
fn table(path: &Path) -> Result<Option<Table>> {
    let Some(text) = bounded_file::read(path)? else { return Ok(None) };
    let table = text.parse().with_context(|| format!("{} is not TOML", path.display()))?;
    Ok(Some(table))
}

/// The files that an import names: one, or with `*.toml` those of a directory.
fn files(pattern: &str) -> Vec<PathBuf> {
    let path = Path::new(pattern);
    let Some(suffix) = path.file_name().and_then(|name| name.to_str()?.strip_prefix('*')) else {
        return vec![path.to_owned()];
    };
    let entries = path.parent().and_then(|directory| fs::read_dir(directory).ok());
    let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.to_string_lossy().ends_with(suffix)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_in_the_configuration_or_in_a_file_that_it_imports_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let imports = format!("version = 3\nimports = [\"{}/*.toml\"]\n", path("d").display());
        fs::create_dir(path("d")).unwrap();
        fs::write(path("c.toml"), &imports).unwrap();
        assert_eq!(Registries::read(&path("none.toml")).unwrap(), Registries::default());
        assert_eq!(Registries::read(&path("c.toml")).unwrap(), Registries::default());
        for plugin in PLUGINS {
            let registry = format!("[plugins.\"{plugin}\".registry");
            fs::write(path("d/x.toml"), format!("{registry}.mirrors.\"a\"]\nendpoint = []\n"))
                .unwrap();
            let found = Registries::read(&path("c.toml")).unwrap();
            assert!(found.mirrors.unwrap().contains(plugin) && !found.reads_hosts);
            fs::write(path("d/x.toml"), format!("{registry}]\nconfig_path = \"/etc/c\"\n"))
                .unwrap();
            let found = Registries::read(&path("c.toml")).unwrap();
            assert_eq!(found, Registries { mirrors: None, reads_hosts: true });
        }
        fs::write(path("d/x.toml"), "not = toml = at all").unwrap();
        let error = format!("{:#}", Registries::read(&path("c.toml")).unwrap_err());
        assert!(error.contains("x.toml"), "{error}");
    }
}
