"""Pods that choose Lazuli by RuntimeClass, on a node with another default."""

from ..images import OPEN
from ..shell import wait
from ..table import Failed, expect
from .disk import rootfs

# Has the image pulled for the pod's runtime.
PULLED = {"io.containerd.cri.runtime-handler": "lazuli"}


def runtime_class(cluster):
    """Such a pod beside one without it."""
    become(cluster, "runtime")
    cluster.run("lazy", f"{OPEN}/redis:lazy", runtimeClassName="lazuli", annotations=PULLED)
    cluster.run("plain", f"{OPEN}/redis:plain")
    expect(cluster.mount_of(f"{OPEN}/redis"), "the image is not mounted lazily")
    snapshots = cluster.node.sh("ctr -n k8s.io containers ls | grep redis:plain | awk '{print $1}' | xargs ctr -n k8s.io containers info | grep Snapshotter")
    expect("overlayfs" in snapshots, f"the ordinary pod has {snapshots}")
    return "starts lazily with the class and the annotation, others use overlayfs"


def its_limits(cluster):
    """What containerd does not count for it."""
    become(cluster, "runtime")
    cluster.run("lazy", f"{OPEN}/busybox:lazy", runtimeClassName="lazuli", annotations=PULLED)
    cluster.exec("lazy", "dd", "if=/dev/zero", "of=/written", "bs=1M", "count=30")
    wait(30, "statistics", cluster.summary)
    counted = rootfs(cluster, "lazy") or 0
    expect(counted < 1 << 20, f"containerd counts {counted} bytes: say so in docs/kubernetes.md")
    return "the summary answers, what its pods write is not counted"


def cgroup_drivers(cluster):
    """The groups of such pods, with the kubelet's driver systemd and with cgroupfs."""
    seen = []
    for driver in ("systemd", "cgroupfs"):
        kubelet_driver(cluster, driver)
        cluster.tidy()
        become(cluster, "runtime")
        cluster.run("lazy", f"{OPEN}/redis:lazy", runtimeClassName="lazuli", annotations=PULLED)
        group = cluster.node.sh("cat /proc/$(pgrep -f '^sleep infinity' | tail -n 1)/cgroup | grep -m 1 -E ':memory:|^0::' | cut -d: -f3")
        expect("kubepods" in group, f"with {driver} the pod is in {group}")
        usage = wait(60, f"the pod's memory to be counted with {driver}", lambda: memory(cluster, "lazy"))
        seen.append(f"{driver}: in {next(part for part in group.split('/') if part.startswith('kubepods'))}, {usage >> 10} KiB counted")
    return "; ".join(seen)


def memory(cluster, name):
    """What a pod takes, as the kubelet counts it."""
    pods = {pod["podRef"]["name"]: pod for pod in cluster.summary()["pods"]}
    if not pods.get(name, {}).get("memory", {}).get("usageBytes"):
        raise Failed(f"it has {pods.get(name)}")
    return pods[name]["memory"]["usageBytes"]


def kubelet_driver(cluster, driver):
    """Gives kubelet and containerd another cgroup driver, as an operator does on a drained node."""
    cluster.node.cgroup_driver(driver)
    cluster.node.run("systemctl", "stop", "kubelet")
    cluster.restart_runtime()
    cluster.node.run("systemctl", "start", "kubelet")
    wait(60, "the node to be Ready", cluster.node_is_ready)


def back_to_all(cluster):
    """The same node, on which every pod uses it again."""
    become(cluster, "all")
    cluster.run("lazy", f"{OPEN}/redis:lazy")
    expect(cluster.mount_of(f"{OPEN}/redis"), "the image is not mounted lazily")
    return "`PODS` changed: every pod uses it"


def become(cluster, pods):
    """Has the DaemonSet set up the node for these pods."""
    cluster.manifest(PODS=pods, RESTART_CONTAINERD="yes")
    cluster.type("kubectl apply -f dist/kubernetes/daemonset.yaml")
    # Also after a change of containerd's configuration alone.
    cluster.kubectl("--namespace=lazuli", "rollout", "restart", "daemonset", "lazuli")
    wait(180, "the DaemonSet to be Ready", cluster.daemonset_is_ready)


SCENARIOS = [
    (runtime_class, "RuntimeClass"),
    (its_limits, "RuntimeClass: what is counted"),
    (cgroup_drivers, "RuntimeClass with both cgroup drivers"),
    (back_to_all, "another choice of pods on the same node"),
]
