"""Thirty cold pods of one image at once, 20 ms and 1 Gbit/s away, beside overlayfs."""

import contextlib
import statistics
import subprocess
import time

from ..images import OPEN
from ..shell import run, wait
from ..table import expect

NEEDS = ("installation", "crowd-with-overlayfs")

# Images, and the most that Lazuli's last pod may take of the time of the last one with overlayfs.
MOST = {"python-slim": 0.85, "python": 0.5}
PODS = 30
ROUNDS = 5
FAR = "127.0.0.1:5002"


@contextlib.contextmanager
def far_registry(cluster):
    """The open registry, a long way off."""
    command = [cluster.testkit / "wire", OPEN, "--round-trip", "20", "--megabits", "1000", "--at", FAR]
    process = subprocess.Popen(["nsenter", "--target", str(cluster.node.pid), "--net", "--", *command], stdout=subprocess.DEVNULL)
    try:
        wait(10, "the far registry", lambda: cluster.node.sh(f"curl -s {FAR}/v2/ > /dev/null && echo yes"))
        yield
    finally:
        process.kill()
        process.wait()


def ready(cluster, image):
    """Seconds until the last of the pods has run a program of the image."""
    # Else the kubelet may remove those of earlier pods meanwhile, which takes a second or two.
    remove_sandboxes(cluster)
    before = tasks(cluster)
    said = {"exec": {"command": ["python3", "-c", "print('hello')"]}}
    container = {"name": "main", "image": image, "command": ["sleep", "infinity"], "lifecycle": {"postStart": said}}
    labels = {"app": "crowd"}
    template = {"metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False, "containers": [container],
                         # Before Lazuli is installed, the node has its start-up taint.
                         "tolerations": [{"key": "lazuli/not-ready", "operator": "Exists"}]}}
    started = time.monotonic()
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "crowd"},
                   "spec": {"replicas": PODS, "selector": {"matchLabels": labels}, "template": template}})
    cluster.rolled_out("crowd", 300)
    seconds = time.monotonic() - started
    cluster.tidy()
    # Their end takes processor time that the next ones would miss.
    wait(120, "processes of the pods to end", lambda: tasks(cluster) <= before)
    return seconds


def tasks(cluster):
    """How many containers run on the node."""
    return len(cluster.node.run("ctr", "-n", "k8s.io", "tasks", "ls", "-q").split())


def rounds(cluster, image):
    """Medians of the seconds with nothing of the image on the node, and with the image there."""
    before, seen = stored(cluster), []
    for _ in range(ROUNDS):
        cluster.node.sh("rm -f /var/lib/lazuli/traces/* /var/lib/lazuli/lessons/*")
        seen.append((ready(cluster, image), ready(cluster, image)))
        expect(stored(cluster) - before, "nothing of the image is found on the node")
        remove_sandboxes(cluster)
        cluster.remove_image(image)
        wait(180, "the image to be gone", lambda: stored(cluster) <= before)
    return tuple(map(statistics.median, zip(*seen)))


def remove_sandboxes(cluster):
    """Does what the kubelet does up to a minute after the end of pods: until then their snapshots
    stay."""
    containers, running = (set(cluster.node.run("ctr", "-n", "k8s.io", what, "ls", "-q").split()) for what in ("containers", "tasks"))
    for container in containers - running:
        # The removal of a sandbox does nothing for the id of another container.
        run(cluster.testkit / "cri", f"/proc/{cluster.node.pid}/root/run/containerd/containerd.sock", "rm", container)


def stored(cluster):
    """Names of containerd's snapshots, and of what Lazuli has of images."""
    return set(cluster.node.sh(
        "for snapshotter in overlayfs lazuli; do ctr -n k8s.io snapshots --snapshotter $snapshotter ls 2> /dev/null | tail -n +2 | cut -d ' ' -f 1 || true; done; "
        "ls /var/lib/lazuli/images /var/lib/lazuli/cache/blobs 2> /dev/null || true").split())


def crowd_with_overlayfs(cluster):
    """Before Lazuli is installed: cold, and once more with the image there."""
    # It stays on the node, unlike the pods' image.
    cluster.node.run("ctr", "-n", "k8s.io", "images", "pull", "--plain-http", f"{OPEN}/pause:1")
    with far_registry(cluster):
        for name in MOST:
            cluster.images.push(name)
            image = f"{FAR}/{name}:plain"
            cluster.overlayfs[name] = rounds(cluster, image)
    return "; ".join(f"{name}: {cold:.1f} s, {warm:.1f} s with the image there" for name, (cold, warm) in cluster.overlayfs.items())


def crowd(cluster):
    """The same with Lazuli, which has seen no start of the image."""
    said, slow = [], False
    with far_registry(cluster):
        for name, most in MOST.items():
            cluster.images.convert(name, f"{OPEN}/{name}:lazy")
            image = f"{FAR}/{name}:lazy"
            seconds, there = rounds(cluster, image)
            cold, warm = cluster.overlayfs[name]
            share = seconds / cold
            said.append(f"{name}: {seconds:.1f} s, {cold:.1f} s with overlayfs ({share:.2f}); with the image there {there:.1f} and {warm:.1f} s")
            slow |= share > most
    expect(not slow, f"{'; '.join(said)}; at most {MOST}")
    return f"medians of {ROUNDS}: " + "; ".join(said)


SCENARIOS = [(crowd, "30 pods of one image at once, behind 20 ms and 1 Gbit/s")]
