"""Before Lazuli is installed, and up to the first lazy pod."""

import time

from ..images import OPEN
from ..shell import wait
from ..table import expect

NEEDS = ()


def installation(cluster):
    """The DaemonSet, as docs/kubernetes.md has a newcomer apply it."""
    cluster.manifest(PODS="all", RESTART_CONTAINERD="yes")
    cluster.start("early", f"{OPEN}/busybox:lazy")
    wait(30, "a pod to wait for the taint", lambda: "untolerated taint" in str(cluster.get("pod", "early")["status"]))
    started = time.monotonic()
    cluster.type("kubectl apply -f dist/kubernetes/daemonset.yaml")
    wait(120, "the DaemonSet to be Ready", cluster.daemonset_is_ready)
    installed = time.monotonic() - started
    cluster.type("kubectl -n lazuli rollout status daemonset lazuli")
    first = cluster.run("first", f"{OPEN}/redis:lazy")
    mount = cluster.mount_of(f"{OPEN}/redis")
    expect(mount, "the first pod's image is not mounted lazily")
    cluster.ready("early")
    expect("taints" not in cluster.get("node", "node1")["spec"], "the node still has a taint")
    events = cluster.get("events", "--namespace=lazuli")["items"]
    # A probe that is under way does not survive the restart of containerd.
    unhealthy = [it["message"] for it in events if it["reason"] == "Unhealthy" and "containerd.sock" not in it["message"]]
    expect(not unhealthy, f"an event of the DaemonSet's start: {unhealthy}")
    return f"2 commands; Ready after {installed:.0f} s with a restart of containerd, the first lazy pod {first:.0f} s later; a pod that came too early waited for the start-up taint to go"


SCENARIOS = [
    (installation, "from an empty cluster to the first lazy pod"),
]
