//! Confinement of a container: capabilities, system calls, limits, and hidden parts of /proc and
//! /sys.
//!
//! All of it equals what `docker run` sets up, since images are made for that.

use std::fs;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::seccomp;

/// Capabilities of a Docker container.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Files that reveal or control the node: covered by an empty file or directory.
const MASKED: [&str; 12] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Processes and threads in a container. Podman's default: enough for any server, too few for a
/// fork bomb to take the process ids of a node.
pub(crate) const DEFAULT_PIDS: u32 = 2048;

/// Limits on the container's use of the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Processes and threads.
    pub(crate) pids: u32,
    /// Bytes of memory; three quarters of the node's without.
    pub(crate) memory: Option<u64>,
}

/// Root keeps the set across exec; for other users the kernel clears capabilities that are not
/// inheritable, as under Docker.
pub(super) fn capabilities() -> Value {
    json!({ "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES })
}

/// The network of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Network {
    /// The host's network, with its addresses and ports
    Host,
    /// A loopback device of its own, and nothing else
    None,
}

/// How far a container is kept from the node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Isolation {
    /// Its network.
    pub(crate) network: Network,
    /// Its limits.
    pub(crate) limits: Limits,
    /// Whether its root is only root of a user namespace.
    pub(crate) user_namespace: bool,
}

/// The `linux` member of the bundle's configuration, for a container in the control group `cgroup`.
pub(super) fn linux(cgroup: &str, isolation: Isolation) -> Value {
    let Isolation { network, limits, user_namespace } = isolation;
    let mut kinds = vec!["pid", "ipc", "uts", "mount", "cgroup"];
    if network == Network::None {
        kinds.push("network");
    }
    if user_namespace {
        kinds.push("user");
    }
    let namespaces: Vec<_> = kinds.into_iter().map(|kind| json!({ "type": kind })).collect();
    let mut linux = json!({
        "cgroupsPath": cgroup,
        "namespaces": namespaces,
        "resources": resources(limits, &controllers()),
        "seccomp": seccomp::profile(),
        "maskedPaths": MASKED,
        "readonlyPaths": READ_ONLY,
    });
    if network == Network::None {
        // That any user may listen on any port is Docker's and containerd's setting.
        linux["sysctl"] = json!({ "net.ipv4.ip_unprivileged_port_start": "0" });
    }
    if user_namespace {
        // All ids are mapped to themselves, so the image's owners need no translation. The
        // namespace takes away root's power: its capabilities apply to the container's objects
        // only, and to none of the node's.
        let every = json!([{ "containerID": 0, "hostID": 0, "size": u32::MAX }]);
        linux["uidMappings"] = every.clone();
        linux["gidMappings"] = every;
    }
    linux
}

/// The limits whose controllers the node has: runc refuses others.
fn resources(limits: Limits, controllers: &[String]) -> Value {
    let has = |name: &str| controllers.iter().any(|controller| controller == name);
    // A container has the devices of Docker's, which runc makes and allows.
    let mut resources = json!({ "devices": [{ "allow": false, "access": "rwm" }] });
    if has("pids") {
        resources["pids"] = json!({ "limit": limits.pids });
    }
    if let Some(bytes) = limits.memory.or_else(default_memory).filter(|_| has("memory")) {
        resources["memory"] = json!({ "limit": bytes });
    }
    resources
}

/// Three quarters of the node's memory: the rest is for the daemon that serves the container's
/// files, and for all else.
fn default_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some((kilobytes << 10) / 4 * 3)
}

/// The controllers of this node, of cgroup version 2 and 1.
fn controllers() -> Vec<String> {
    let unified = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let first = mounts.lines().filter_map(|line| {
        // FIELDS - TYPE SOURCE OPTIONS
        let (_, file_system) = line.split_once(" - ")?;
        let mut fields = file_system.split(' ');
        (fields.next()? == "cgroup").then(|| fields.nth(1)).flatten()
    });
    let first = first.flat_map(|options| options.split(','));
    unified.split_whitespace().chain(first).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_needs_its_controller() {
        let limits = Limits { pids: 7, memory: Some(1 << 20) };
        let both = resources(limits, &["memory".into(), "pids".into()]);
        assert_eq!(both["pids"]["limit"], 7);
        assert_eq!(both["memory"]["limit"], 1 << 20);
        let none = resources(limits, &["cpu".into()]);
        assert!(none["pids"].is_null() && none["memory"].is_null());
    }

    #[test]
    fn the_default_has_no_memory_limit() {
        let limits = Limits { pids: DEFAULT_PIDS, memory: None };
        let limit = resources(limits, &["memory".into()])["memory"]["limit"].as_u64().unwrap();
        assert!(limit > 0);
    }

    #[test]
    fn namespaces_follow_what_is_asked_for() {
        let limits = Limits { pids: 1, memory: None };
        let linux = |network, user_namespace| {
            linux("/lazuli/x", Isolation { network, limits, user_namespace }).to_string()
        };
        assert!(!linux(Network::Host, false).contains(r#"{"type":"network"}"#));
        assert!(linux(Network::None, false).contains(r#"{"type":"network"}"#));
        assert!(!linux(Network::None, false).contains("uidMappings"));
        assert!(linux(Network::None, true).contains(r#"{"type":"user"}"#));
    }
}
