//! containerd's configuration as its files have it, which it reads when it starts.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use toml::{Table, Value};

use super::{NAME, VIRTUAL_MACHINES};
use crate::bounded_file;

/// The output of `containerd config dump`.
#[derive(Debug)]
pub(crate) struct Files {
    main: PathBuf,
    table: Table,
    names: Vec<String>,
}

/// Plugins with a table of snapshotters: of containerd 1.x, and of 2.x.
const TABLES: [&str; 3] =
    ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"];

/// containerd's default configuration file.
const MAIN: &str = "/etc/containerd/config.toml";

impl Files {
    /// Has the program of a process read the files that it was started with. Nothing is in them if
    /// that fails. Lazuli's snapshotter listens at `ours`.
    pub(crate) fn of(pid: u32, ours: &Path) -> Self {
        let process = Path::new("/proc").join(pid.to_string());
        let arguments = fs::read(process.join("cmdline")).unwrap_or_default();
        let main = config_argument(&String::from_utf8_lossy(&arguments));
        let main = main.unwrap_or_else(|| MAIN.into());
        let mut dump = Command::new(process.join("exe"));
        dump.arg0("containerd").arg("--config").arg(&main).args(["config", "dump"]);
        let output = dump.stdin(Stdio::null()).stderr(Stdio::null()).output();
        let text = output.map(|output| output.stdout).unwrap_or_default();
        let table = String::from_utf8_lossy(&text).parse().unwrap_or_default();
        Files { main, names: names(&table, ours), table }
    }

    /// The names of the snapshotter: plugins with its socket. There should be one at most.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// The name of the snapshotter, or the one that it is to have.
    pub(crate) fn name(&self) -> &str {
        self.names.first().map_or(NAME, String::as_str)
    }

    /// The file that containerd begins with.
    pub(crate) fn main(&self) -> &Path {
        &self.main
    }

    /// The directory of the first import that takes any file of a directory. containerd 1.x prints
    /// the files that it found instead.
    pub(crate) fn imports(&self) -> Option<PathBuf> {
        first_directory(&self.table).or_else(|| {
            let text = bounded_file::read(&self.main).ok()??;
            first_directory(&text.parse().ok()?)
        })
    }

    /// Returns whether the files make it the default.
    pub(super) fn is_default(&self) -> bool {
        self.tables().any(|table| self.is_ours(table))
    }

    /// Runtimes that are to have it for themselves.
    pub(super) fn runtimes(&self) -> Vec<String> {
        let all = self.tables().filter_map(|table| table.get("runtimes")?.as_table()).flatten();
        all.filter(|(_, runtime)| self.is_ours(runtime)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns whether containerd hides from snapshotters which image a layer belongs to.
    pub(super) fn hides_annotations(&self) -> bool {
        let hides = |table: &Value| table.get("disable_snapshot_annotations")?.as_bool();
        self.tables().any(|table| hides(table) == Some(true))
    }

    fn is_ours(&self, table: &Value) -> bool {
        table.get("snapshotter").and_then(Value::as_str) == Some(self.name())
    }

    fn tables(&self) -> impl Iterator<Item = &Value> {
        let plugins = self.table.get("plugins");
        let tables = TABLES.iter().filter_map(move |name| plugins?.get(name));
        tables.map(|table| table.get("containerd").unwrap_or(table))
    }
}

/// The snapshotter plugins with this socket, the usual name first. The one for virtual machines has
/// the same socket.
fn names(table: &Table, ours: &Path) -> Vec<String> {
    let plugins = table.get("proxy_plugins").and_then(Value::as_table);
    let is_ours = |plugin: &Value| {
        let address = plugin.get("address").and_then(Value::as_str).unwrap_or_default();
        Path::new(address.strip_prefix("unix://").unwrap_or(address)) == ours
    };
    let all = plugins.into_iter().flatten();
    let ours = all.filter(|(name, plugin)| *name != VIRTUAL_MACHINES && is_ours(plugin));
    let mut names: Vec<_> = ours.map(|(name, _)| name.clone()).collect();
    names.sort_by_key(|name| name != NAME);
    names
}

fn first_directory(table: &Table) -> Option<PathBuf> {
    let imports = table.get("imports")?.as_array()?;
    let mut patterns = imports.iter().filter_map(Value::as_str).map(Path::new);
    patterns.find(|pattern| pattern.ends_with("*.toml"))?.parent().map(Path::to_owned)
}

/// The file that a command line names.
fn config_argument(arguments: &str) -> Option<PathBuf> {
    let mut arguments = arguments.split('\0');
    while let Some(argument) = arguments.next() {
        if matches!(argument, "-c" | "--config" | "-config") {
            return arguments.next().map(PathBuf::from);
        }
        let rest = argument.strip_prefix("--config=").or_else(|| argument.strip_prefix("-c="));
        if let Some(path) = rest {
            return Some(path.into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(text: &str) -> Files {
        let table = text.parse().unwrap();
        Files { main: MAIN.into(), names: names(&table, Path::new("/run/l.sock")), table }
    }

    #[test]
    fn the_file_of_a_command_line_is_found() {
        for (line, expected) in [
            ("containerd\0", None),
            ("containerd\0-c\0/a\0", Some("/a")),
            ("containerd\0--log-level\0info\0--config\0/a\0", Some("/a")),
            ("containerd\0--config=/a\0", Some("/a")),
            ("containerd\0-c\0", Some("")),
        ] {
            let found = config_argument(line);
            assert_eq!(found.as_deref(), expected.map(Path::new), "{line:?}");
        }
    }

    #[test]
    fn the_directory_of_imports_is_found() {
        let imports = "imports = [\"/a/one.toml\", \"/b/*.toml\", \"/c/*.toml\"]";
        assert_eq!(files(imports).imports(), Some("/b".into()));
        let directory = tempfile::tempdir().unwrap();
        let main = directory.path().join("config.toml");
        let resolved = "imports = [\"/b/found.toml\"]".parse::<Table>().unwrap();
        let files = Files { main: main.clone(), table: resolved, names: Vec::new() };
        assert_eq!(files.imports(), None);
        fs::write(&main, imports).unwrap();
        assert_eq!(files.imports(), Some("/b".into()));
    }

    #[test]
    fn the_snapshotter_is_found_by_its_socket() {
        let plugin = |name, address| format!("[proxy_plugins.{name}]\naddress = \"{address}\"\n");
        let vm = plugin(VIRTUAL_MACHINES, "/run/l.sock");
        let other = plugin("nydus", "/run/nydus.sock");
        let default = "[plugins.\"io.containerd.cri.v1.images\"]\nsnapshotter = \"stargz\"\n";
        for (plugins, expected) in [
            (vec![], vec![]),
            (vec![plugin("lazuli", "/run/l.sock")], vec!["lazuli"]),
            (vec![plugin("stargz", "unix:///run/l.sock")], vec!["stargz"]),
            (
                vec![plugin("a", "/run/l.sock"), plugin("lazuli", "/run/l.sock")],
                vec!["lazuli", "a"],
            ),
        ] {
            let files = files(&format!("{vm}{other}{}{default}", plugins.concat()));
            assert_eq!(files.names(), expected);
            assert_eq!(files.name(), *expected.first().unwrap_or(&"lazuli"));
            assert_eq!(files.is_default(), expected == ["stargz"]);
        }
    }

    #[test]
    fn both_versions_of_the_configuration_are_read() {
        for (text, chosen, hides) in [
            (
                "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"lazuli\"\ndisable_snapshot_annotations = true",
                (true, 0),
                true,
            ),
            (
                "[plugins.\"io.containerd.cri.v1.images\"]\nsnapshotter = \"lazuli\"\ndisable_snapshot_annotations = false",
                (true, 0),
                false,
            ),
            (
                "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.l]\nsnapshotter = \"lazuli\"",
                (false, 1),
                false,
            ),
            (
                "[plugins.\"io.containerd.cri.v1.images\"]\nsnapshotter = \"overlayfs\"",
                (false, 0),
                false,
            ),
        ] {
            let files = files(text);
            assert!(files.names().is_empty(), "{text}");
            assert_eq!((files.is_default(), files.runtimes().len()), chosen, "{text}");
            assert_eq!(files.hides_annotations(), hides, "{text}");
        }
        assert!(!files("plugins = 1").is_default());
    }
}
