//! Checks the configuration that the running containerd has read.
//!
//! Its files say what the next containerd will do, so the check asks the process for its plugins,
//! its runtimes, and the directory of its images, which identifies its default snapshotter.

mod client;
mod files;

use lazuli_runtime::daemon::DriverChoice;
use serde_json::Value;

pub(crate) use self::{client::Running, files::Files};
use super::{Node, Row};

/// The usual name of the snapshotter in containerd's configuration.
const NAME: &str = "lazuli";

/// That of the snapshotter for virtual machines.
const VIRTUAL_MACHINES: &str = "lazuli-vm";

/// The command that writes its file.
const SET_UP: &str = "lazuli setup containerd";

/// The command that makes containerd read its files.
const RESTART: &str = "systemctl restart containerd";

/// The key under which containerd exports the directory of our snapshots.
const ROOT: &str = "root";

pub(super) fn connection(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "containerd";
    Some(match &node.containerd {
        Ok(running) => Row::fine(CHECK, format!("version {} runs", running.version)),
        Err(error) => {
            Row::lacking(CHECK, error, "systemctl start containerd, or --containerd SOCKET")
        }
    })
}

pub(super) fn plugin(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "plugin";
    let running = node.containerd.as_ref().ok()?;
    if let names @ [_, _, ..] = running.files.names() {
        let found = format!(
            "containerd's files name the snapshotter {} times, {}: containerd removes snapshots of one name for another",
            names.len(),
            names.join(" and ")
        );
        return Some(Row::lacking(CHECK, found, format!("remove all but one, and {RESTART}")));
    }
    Some(match &running.plugin {
        Some(plugin) if plugin.problem.is_none() => {
            let name = match running.files.name() {
                NAME => String::new(),
                name => format!(" as {name}"),
            };
            Row::fine(CHECK, format!("containerd knows the snapshotter{name}"))
        }
        Some(plugin) => {
            let problem = plugin.problem.as_deref().unwrap_or_default();
            Row::lacking(CHECK, format!("containerd could not load it: {problem}"), RESTART)
        }
        None if !running.files.names().is_empty() => {
            let found = "the running containerd has not read the file that names the snapshotter";
            Row::lacking(CHECK, found, RESTART)
        }
        None => {
            let found = "containerd's configuration does not name the snapshotter";
            Row::lacking(CHECK, found, format!("{SET_UP}, and {RESTART}"))
        }
    })
}

pub(super) fn pods(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "pods";
    let running = node.containerd.as_ref().ok()?;
    let files = &running.files;
    let (runtimes, wanted) = (runtimes(&running.config, files.name()), files.runtimes());
    if is_default(running) != files.is_default() || wanted.iter().any(|it| !runtimes.contains(it)) {
        let found = "the running containerd has not read the file that says which pods use it";
        return Some(Row::lacking(CHECK, found, RESTART));
    }
    if is_default(running) {
        return Some(Row::fine(CHECK, "every pod uses it: it is the default snapshotter"));
    }
    if !runtimes.is_empty() {
        let found = format!("pods with the runtime {} use it", runtimes.join(", "));
        return Some(Row::fine(CHECK, found));
    }
    let found = "no pod uses it: neither the default snapshotter nor that of a runtime";
    Some(Row::lacking(CHECK, found, format!("{SET_UP}, and {RESTART}")))
}

pub(super) fn annotations(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "annotations";
    node.containerd.as_ref().ok()?.files.hides_annotations().then(|| {
        let fix =
            format!("disable_snapshot_annotations = false beside `snapshotter`, and {RESTART}");
        Row::lacking(CHECK, "containerd does not say which image a layer is of", fix)
    })
}

pub(super) fn statistics(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "statistics";
    let running = node.containerd.as_ref().ok()?;
    let plugin = running.plugin.as_ref()?;
    if running.major() < 2 {
        // It doesn't report the exports of its configuration.
        return None;
    }
    let fix = format!(
        "root = {:?} in [proxy_plugins.{}.exports], and {RESTART}",
        node.session.root.display().to_string(),
        running.files.name()
    );
    Some(match plugin.exports.get(ROOT) {
        Some(root) if std::path::Path::new(root).is_dir() => {
            Row::fine(CHECK, format!("the kubelet measures {root}"))
        }
        Some(root) => {
            let found =
                format!("{root} is no directory: the kubelet's statistics of the node fail");
            Row::lacking(CHECK, found, fix)
        }
        None => {
            let found = "the plugin exports no root: the kubelet's statistics of the node fail";
            Row::lacking(CHECK, found, fix)
        }
    })
}

pub(super) fn cgroups(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "cgroups";
    let running = node.containerd.as_ref().ok()?;
    let config = &running.config;
    let ordinary = default_runtime(config)?;
    let wanted = systemd_cgroup(config, ordinary);
    let differs = |name: &&String| systemd_cgroup(config, name) != wanted;
    let runtimes = runtimes(config, running.files.name());
    let odd = runtimes.iter().find(differs)?;
    let found = format!(
        "the runtime {odd} has another cgroup driver than {ordinary}: its pods are not in the kubelet's groups"
    );
    let fix = format!("{SET_UP} (or SystemdCgroup = {wanted} in its options), and {RESTART}");
    Some(Row::lacking(CHECK, found, fix))
}

pub(super) fn user_namespaces(node: &Node<'_>) -> Option<Row> {
    const CHECK: &str = "user-namespaces";
    let running = node.containerd.as_ref().ok()?;
    let (plugin, name) = (running.plugin.as_ref()?, running.files.name());
    let maps = plugin.capabilities.iter().any(|one| one == "remap-ids");
    let asked = node.session.config.snapshotter.as_ref().map(|table| table.driver);
    let driver = match asked {
        None | Some(DriverChoice::Auto) => node.status.as_ref().ok()?.daemon.driver,
        Some(asked) => asked,
    };
    let is_fuse = driver == DriverChoice::Fuse;
    Some(match (maps, is_fuse) {
        (true, false) => Row::fine(CHECK, "pods with hostUsers: false start without a copy"),
        (false, true) => {
            Row::fine(CHECK, "pods with hostUsers: false start with a copy of the image")
        }
        (false, false) => Row::advice(
            CHECK,
            "containerd copies the image for each pod with hostUsers: false",
            format!("capabilities = [\"remap-ids\"] in [proxy_plugins.{name}], and {RESTART}"),
        ),
        (true, true) => Row::advice(
            CHECK,
            "lazy images do not start with hostUsers: false, because FUSE maps no ids",
            format!("take capabilities out of [proxy_plugins.{name}], and {RESTART}"),
        ),
    })
}

impl Running {
    /// The first number of its version.
    pub(crate) fn major(&self) -> u32 {
        let version = self.version.trim_start_matches('v');
        version.split('.').next().and_then(|number| number.parse().ok()).unwrap_or(1)
    }

    /// Returns whether containers of the default runtime are in systemd's control groups.
    pub(crate) fn systemd_cgroup(&self) -> bool {
        default_runtime(&self.config).is_some_and(|name| systemd_cgroup(&self.config, name))
    }
}

/// Returns whether the snapshotter is containerd's default. containerd 2 shows that by the
/// directory of its images, 1.x in its configuration.
fn is_default(running: &Running) -> bool {
    let named = running.config.pointer("/containerd/snapshotter").and_then(Value::as_str);
    let root = running.plugin.as_ref().and_then(|plugin| plugin.exports.get(ROOT));
    named == Some(running.files.name())
        || root.is_some_and(|root| running.images.as_ref() == Some(root))
}

/// Runtimes that have the snapshotter for themselves.
fn runtimes(config: &Value, snapshotter: &str) -> Vec<String> {
    let all = config.pointer("/containerd/runtimes").and_then(Value::as_object);
    let ours = all
        .into_iter()
        .flatten()
        .filter(|(_, it)| it.get("snapshotter").and_then(Value::as_str) == Some(snapshotter));
    ours.map(|(name, _)| name.clone()).collect()
}

fn default_runtime(config: &Value) -> Option<&str> {
    config.pointer("/containerd/defaultRuntimeName")?.as_str()
}

fn systemd_cgroup(config: &Value, runtime: &str) -> bool {
    let path = ["containerd", "runtimes", runtime, "options", "SystemdCgroup"];
    let found = path.iter().try_fold(config, |value, key| value.get(key));
    found.and_then(Value::as_bool).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(ours: bool) -> Value {
        json!({"containerd": {"defaultRuntimeName": "runc", "runtimes": {
            "runc": {"snapshotter": "", "options": {"SystemdCgroup": true}},
            "lazuli": {"snapshotter": "lazuli", "options": {"SystemdCgroup": ours}},
        }}})
    }

    #[test]
    fn runtimes_and_their_cgroup_drivers_are_read() {
        let config = config(false);
        assert_eq!(runtimes(&config, NAME), ["lazuli"]);
        assert_eq!(default_runtime(&config), Some("runc"));
        assert!(systemd_cgroup(&config, "runc") && !systemd_cgroup(&config, "lazuli"));
        for odd in [json!(null), json!({"containerd": []}), json!({"containerd": {"runtimes": 1}})]
        {
            assert!(runtimes(&odd, NAME).is_empty());
            assert!(!systemd_cgroup(&odd, "runc"));
        }
    }
}
