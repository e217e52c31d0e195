"""Pods while processes of the node end or are replaced."""

import contextlib
import subprocess
import time

from ..images import OPEN
from ..shell import PATIENCE, wait
from ..table import expect

READER = "while [ ! -e /tmp/stop ]; do find /usr /bin -xdev -type f -exec md5sum {} + | sort | md5sum || exit 1; done"


@contextlib.contextmanager
def reader(cluster, name="reader", image=f"{OPEN}/redis:lazy"):
    """A pod in which everything is read over and over. At the end no read has failed, and all read
    the same.

    Yields a list that gets the number of passes.
    """
    cluster.run(name, image)
    passes = []
    process = subprocess.Popen(cluster.node.inside("kubectl", "exec", name, "--", "sh", "-c", READER), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        time.sleep(1)
        yield passes
        cluster.exec(name, "touch", "/tmp/stop")
        sums, errors = process.communicate(timeout=120 * PATIENCE)
        expect(process.returncode == 0, f"a reader saw an error: {errors[-500:]}")
        expect(len(set(sums.split("\n")) - {""}) == 1, f"a reader saw different bytes: {sums}")
        passes.append(sums.count("\n"))
    finally:
        process.kill()
        process.wait()


def worker_killed(cluster):
    """kill -9 of the worker, three times."""
    with reader(cluster) as passes:
        for _ in range(3):
            before = cluster.status()["daemon"]["worker_pid"]
            cluster.node.run("kill", "-KILL", before)
            wait(30, "another worker", lambda: cluster.status()["daemon"]["worker_pid"] != before)
        cluster.run("after", f"{OPEN}/busybox:lazy")
    return f"killed 3 times: {passes[0]} passes of a reader without an error"


def keeper_killed(cluster):
    """kill -9 of the keeper."""
    with reader(cluster) as passes:
        killed(cluster, "keeper_pid")
        cluster.run("after", f"{OPEN}/busybox:lazy")
    return f"{passes[0]} passes of a reader without an error"


def both_killed(cluster):
    """kill -9 of both at once."""
    with reader(cluster) as passes:
        killed(cluster, "keeper_pid", "worker_pid")
        cluster.run("after", f"{OPEN}/busybox:lazy")
    return f"{passes[0]} passes of a reader without an error"


def killed(cluster, *names):
    """Kills processes of the daemon at once, and waits for others."""
    daemon = cluster.status()["daemon"]
    before = [daemon[name] for name in names]
    cluster.node.run("kill", "-KILL", *before)
    wait(30, "another daemon", lambda: not set(before) & set(cluster.status()["daemon"].get(name) for name in names))


def containerd_restarted(cluster):
    """systemctl restart containerd."""
    cluster.run("pod", f"{OPEN}/redis:lazy")
    before = cluster.get("pod", "pod")["status"]["containerStatuses"][0]["containerID"]
    cluster.restart_containerd()
    cluster.run("after", f"{OPEN}/busybox:lazy")
    after = cluster.get("pod", "pod")["status"]["containerStatuses"][0]
    expect(after["containerID"] == before and after["restartCount"] == 0, "the container is another one")
    cluster.exec("pod", "redis-server", "--version")
    return "the pod goes on in the same container and reads on, others start"


def upgrade(cluster):
    """The DaemonSet with another image, and its configuration changed."""
    cluster.images.node_image("2", cluster.lazuli.read_bytes() + b"\0")
    before = cluster.status()["daemon"]["keeper_pid"]
    with reader(cluster) as passes:
        cluster.manifest(tag="2", PODS="all", RESTART_CONTAINERD="yes")
        cluster.type("kubectl apply -f dist/kubernetes/daemonset.yaml")
        wait(180, "the DaemonSet to be Ready", cluster.daemonset_is_ready)
        middle = cluster.status()["daemon"]["keeper_pid"]
        expect(middle != before, "the new version did not take over")
        cluster.type("kubectl -n lazuli rollout restart daemonset lazuli")
        wait(180, "the DaemonSet to be Ready", cluster.daemonset_is_ready)
        expect(cluster.status()["daemon"]["keeper_pid"] == middle, "a pod without anything new replaced the service")
    return f"another keeper; {passes[0]} passes of a reader without an error"


def reboot(cluster):
    """The node is powered off and booted again."""
    cluster.run("pod", f"{OPEN}/redis:lazy")
    cluster.node.reboot()
    booted = time.monotonic()
    wait(120, "the node to be Ready", cluster.node_is_ready)
    wait(120, "the pod to run again", lambda: cluster.exec("pod", "redis-server", "--version"))
    return f"the pod runs {time.monotonic() - booted:.0f} s after the boot"


SCENARIOS = [
    (worker_killed, "worker killed"),
    (keeper_killed, "keeper killed"),
    (both_killed, "both killed at once"),
    (containerd_restarted, "containerd restarted"),
    (upgrade, "DaemonSet upgraded"),
    (reboot, "reboot"),
]
