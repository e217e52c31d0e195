"""Thirty cold pods of one image at once, 20 ms and 1 Gbit/s away, beside overlayfs."""

import contextlib
import statistics
import subprocess
import time

from ..images import OPEN
from ..shell import run, wait
from ..table import expect
from .runtime_class import PULLED, become

# Images, and the most that Lazuli's last pod may take of the time of the last one with overlayfs.
MOST = {"python-slim": 0.85, "python": 0.5}
PODS = 30
ROUNDS = 5
FAR = "127.0.0.1:5002"
# The same registry for pulls with overlayfs, which do not go through the mirror.
FAR_WITHOUT_MIRROR = "127.0.0.1:5003"


@contextlib.contextmanager
def far_registry(cluster, at):
    """The open registry, a long way off."""
    command = [cluster.testkit / "wire", OPEN, "--round-trip", "20", "--megabits", "1000", "--at", at]
    process = subprocess.Popen(["nsenter", "--target", str(cluster.node.pid), "--net", "--", *command], stdout=subprocess.DEVNULL)
    try:
        wait(10, "the far registry", lambda: cluster.node.sh(f"curl -s {at}/v2/ > /dev/null && echo yes"))
        yield
    finally:
        process.kill()
        process.wait()


def ready(cluster, image, is_lazy):
    """Seconds until the last of the pods has run a program of the image."""
    # Else the kubelet may remove those of earlier pods meanwhile, which takes a second or two.
    remove_sandboxes(cluster)
    before = tasks(cluster)
    said = {"exec": {"command": ["python3", "-c", "print('hello')"]}}
    container = {"name": "main", "image": image, "command": ["sleep", "infinity"], "lifecycle": {"postStart": said}}
    labels = {"app": "crowd"}
    spec = {"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False, "containers": [container]}
    metadata = {"labels": labels}
    if is_lazy:
        spec["runtimeClassName"], metadata["annotations"] = "lazuli", PULLED
    started = time.monotonic()
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "crowd"},
                   "spec": {"replicas": PODS, "selector": {"matchLabels": labels}, "template": {"metadata": metadata, "spec": spec}}})
    cluster.rolled_out("crowd", 300)
    seconds = time.monotonic() - started
    cluster.tidy()
    # Their end takes processor time that the next ones would miss.
    wait(120, "processes of the pods to end", lambda: tasks(cluster) <= before)
    return seconds


def tasks(cluster):
    """How many containers run on the node."""
    return len(cluster.node.run("ctr", "-n", "k8s.io", "tasks", "ls", "-q").split())


def cold_and_warm(cluster, image, is_lazy):
    """The seconds with nothing of the image on the node, and with the image there."""
    before = stored(cluster)
    cluster.node.sh("rm -f /var/lib/lazuli/traces/* /var/lib/lazuli/lessons/*")
    cold = ready(cluster, image, is_lazy)
    expect(stored(cluster) - before, "nothing of the image is found on the node")
    if is_lazy:
        wait(120, "the rest of the image", lambda: cluster.mount_of(image)["bytes_missing"] == 0)
    warm = ready(cluster, image, is_lazy)
    remove_sandboxes(cluster)
    cluster.remove_image(image)
    wait(180, "the image to be gone", lambda: stored(cluster) <= before)
    return cold, warm


def remove_sandboxes(cluster):
    """Does what the kubelet does up to a minute after the end of pods: until then their snapshots
    stay."""
    def removed():
        containers, running = (set(cluster.node.run("ctr", "-n", "k8s.io", what, "ls", "-q").split()) for what in ("containers", "tasks"))
        for container in containers - running:
            # The removal of a sandbox does nothing for the id of another container.
            run(cluster.testkit / "cri", f"/proc/{cluster.node.pid}/root/run/containerd/containerd.sock", "rm", container)
        return True

    # The kubelet may be removing one of them itself.
    wait(60, "ended pods to be removed", removed)


def stored(cluster):
    """Names of containerd's snapshots, and of what Lazuli has of images."""
    return set(cluster.node.sh(
        "for snapshotter in overlayfs lazuli; do ctr -n k8s.io snapshots --snapshotter $snapshotter ls 2> /dev/null | tail -n +2 | cut -d ' ' -f 1 || true; done; "
        "ls /var/lib/lazuli/images /var/lib/lazuli/cache/blobs 2> /dev/null || true").split())


def crowd(cluster):
    """With Lazuli, which has seen no start of the image, and with overlayfs on the same node. The
    machine's speed changes within minutes, so the two take turns, and each is compared with its
    neighbour."""
    # It stays on the node, unlike the pods' image.
    cluster.node.run("ctr", "-n", "k8s.io", "images", "pull", "--plain-http", f"{OPEN}/pause:1")
    own = cluster.node.root / "etc/containerd/certs.d" / FAR_WITHOUT_MIRROR
    own.mkdir()
    (own / "hosts.toml").write_text(f'server = "http://{FAR_WITHOUT_MIRROR}"\n')
    become(cluster, "runtime")
    try:
        with far_registry(cluster, FAR), far_registry(cluster, FAR_WITHOUT_MIRROR):
            shares = {name: take_turns(cluster, name) for name in MOST}
    finally:
        become(cluster, "all")
    said = "; ".join(text for text, _ in shares.values())
    expect(all(share <= MOST[name] for name, (_, share) in shares.items()), f"{said}; at most {MOST}")
    return f"medians of {ROUNDS} rounds: {said}"


def take_turns(cluster, name):
    """What is to be said of an image, and the median of Lazuli's seconds ÷ overlayfs'."""
    cluster.images.push(name)
    cluster.images.convert(name, f"{OPEN}/{name}:lazy")
    seen = []
    for number in range(1, ROUNDS + 1):
        overlayfs = cold_and_warm(cluster, f"{FAR_WITHOUT_MIRROR}/{name}:plain", False)
        lazuli = cold_and_warm(cluster, f"{FAR}/{name}:lazy", True)
        seen.append([*lazuli, *overlayfs, *(ours / theirs for ours, theirs in zip(lazuli, overlayfs))])
        print(f"  {name}, round {number} of {ROUNDS}: {lazuli[0]:.1f} s, {overlayfs[0]:.1f} s with overlayfs", flush=True)
    cold, warm, cold_overlayfs, warm_overlayfs, share, warm_share = map(statistics.median, zip(*seen))
    return (f"{name}: {cold:.1f} s, {cold_overlayfs:.1f} s with overlayfs ({share:.2f}); "
            f"with the image there {warm:.1f} and {warm_overlayfs:.1f} s ({warm_share:.2f})"), share


SCENARIOS = [(crowd, "30 pods of one image at once, behind 20 ms and 1 Gbit/s")]
