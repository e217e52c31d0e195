//! The Kubernetes container that a thread is in.
//!
//! The kubelet and containerd put the container's id and the pod's uid into the names of control
//! groups, and the kubelet has directories of logs that are named after pods. So nothing has to be
//! asked, and pods of any runtime are found.

use std::{fs, path::Path};

/// The kubelet's directory of logs: `pods/NAMESPACE_NAME_UID/CONTAINER/`, and links
/// `containers/POD_NAMESPACE_CONTAINER-ID.log`.
pub(super) const LOGS: &str = "/var/log";

/// Digits of a container's id.
const ID: usize = 64;

/// Least digits of a pod's uid.
const UID: usize = 32;

/// Limit of entries to read from a directory. A node has some hundred pods.
const MOST: usize = 10_000;

/// The known properties of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Container {
    /// Its id at containerd.
    pub(in crate::daemon) id: Option<String>,
    /// Its name in its pod.
    pub(in crate::daemon) name: Option<String>,
    /// Its pod as `NAMESPACE/NAME`.
    pub(in crate::daemon) pod: Option<String>,
    /// The pod's uid.
    pub(in crate::daemon) pod_uid: Option<String>,
}

impl Container {
    /// The container with these control groups, as `/proc/PID/cgroup` has them; `logs` is where the
    /// kubelet keeps its logs. Blocks.
    pub(in crate::daemon) fn of(groups: &str, logs: &Path) -> Self {
        let id = parts(groups).find_map(container_id);
        let pod_uid = parts(groups).find_map(pod_uid);
        let name = id.as_ref().and_then(|id| container_name(logs, id));
        let pod = pod_uid.as_ref().and_then(|uid| pod_name(logs, uid));
        Container { id, name, pod, pod_uid }
    }
}

/// The names of all groups in the list.
fn parts(groups: &str) -> impl Iterator<Item = &str> {
    groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).flat_map(|path| path.split('/'))
}

/// `ID`, `cri-containerd-ID.scope`, `kubepods-…:cri-containerd:ID`.
fn container_id(group: &str) -> Option<String> {
    let group = group.strip_suffix(".scope").unwrap_or(group);
    let id = group.rsplit(['-', ':']).next()?;
    let is_id = id.len() == ID && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_id.then(|| id.to_owned())
}

/// `podUID`, `kubepods-besteffort-podUID.slice` with underscores.
fn pod_uid(group: &str) -> Option<String> {
    let group = group.strip_suffix(".slice").unwrap_or(group);
    let uid = match group.strip_prefix("pod") {
        Some(uid) => uid,
        None => group.strip_prefix("kubepods")?.rsplit_once("-pod")?.1,
    };
    let is_uid = (UID..=ID).contains(&uid.len())
        && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b'-' | b'_'));
    is_uid.then(|| uid.replace('_', "-"))
}

fn names_in(directory: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().take(MOST);
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

fn pod_name(logs: &Path, uid: &str) -> Option<String> {
    names_in(&logs.join("pods")).find_map(|name| {
        let (pod, known) = name.rsplit_once('_')?;
        let (namespace, pod) = pod.split_once('_')?;
        (known == uid).then(|| format!("{namespace}/{pod}"))
    })
}

fn container_name(logs: &Path, id: &str) -> Option<String> {
    names_in(&logs.join("containers")).find_map(|name| {
        let name = name.strip_suffix(".log")?.strip_suffix(id)?.strip_suffix('-')?;
        Some(name.rsplit_once('_')?.1.to_owned())
    })
}

/// A list of control groups.
#[cfg(fuzzing)]
pub fn fuzz(groups: &str) {
    let Container { id, pod_uid, .. } = Container::of(groups, Path::new("/nowhere"));
    assert!(id.is_none_or(|id| id.len() == ID));
    assert!(pod_uid.is_none_or(|uid| !uid.contains(['/', '.'])));
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "0f7a3c55-6f6e-4b1c-9d3a-6b2f0c4a1e77";

    fn logs() -> tempfile::TempDir {
        let logs = tempfile::tempdir().unwrap();
        for name in ["kube-system_dns-1_another", &format!("shop_web-5d9_{POD}")] {
            fs::create_dir_all(logs.path().join("pods").join(name)).unwrap();
        }
        let containers = logs.path().join("containers");
        fs::create_dir(&containers).unwrap();
        let id = "a".repeat(ID);
        fs::write(containers.join(format!("web-5d9_shop_front-end-{id}.log")), "").unwrap();
        fs::write(containers.join("unrelated.log"), "").unwrap();
        logs
    }

    #[test]
    fn a_container_is_told_by_its_group_with_either_driver() {
        let (logs, id) = (logs(), "a".repeat(ID));
        let found = Container {
            id: Some(id.clone()),
            name: Some("front-end".to_owned()),
            pod: Some("shop/web-5d9".to_owned()),
            pod_uid: Some(POD.to_owned()),
        };
        let slice = POD.replace('-', "_");
        for groups in [
            format!("0::/kubepods/besteffort/pod{POD}/{id}\n"),
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{id}.scope\n"
            ),
            format!(
                "0::/kubepods.slice/kubepods-pod{slice}.slice/cri-containerd-{id}.scope/init\n"
            ),
            format!(
                "12:pids:/kubepods/pod{POD}/{id}\n1:name=systemd:/kubepods/pod{POD}/{id}\n0::/\n"
            ),
            format!("3:cpu:/system.slice/kubepods-pod{slice}.slice:cri-containerd:{id}/pod{POD}\n"),
        ] {
            assert_eq!(Container::of(&groups, logs.path()), found, "{groups}");
        }
    }

    #[test]
    fn a_container_unknown_to_the_kubelet_keeps_its_ids() {
        let empty = tempfile::tempdir().unwrap();
        let id = "b".repeat(ID);
        let groups = format!("0::/kubepods/pod{POD}/{id}\n");
        let expected =
            Container { id: Some(id), pod_uid: Some(POD.to_owned()), ..Container::default() };
        assert_eq!(Container::of(&groups, empty.path()), expected);
    }

    #[test]
    fn other_groups_are_no_containers() {
        for groups in [
            "",
            "0::/\n",
            "0::/user.slice/user-0.slice/session-1.scope\n",
            "nonsense\n1:2\n",
            "0::/podman/pod_/x\n",
            "0::/kubepods/pod../../etc\n",
        ] {
            assert_eq!(Container::of(groups, logs().path()), Container::default(), "{groups}");
        }
    }
}
