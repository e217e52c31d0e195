"""The kubelet's view of the disk, and its evictions."""

import os
import time

from ..images import OPEN
from ..shell import wait
from ..table import expect
from .observing import configured

MIB = 1 << 20


def statistics(cluster):
    """stats/summary, with lazy pods on the node."""
    image = cluster.images.variant("busybox", "ballast", 48 * MIB)
    # Else it may all be here before it is read.
    with configured(cluster, '\n[prefetch]\nahead = "nothing"\nrest_bytes_per_second = 0\n'):
        cluster.run("pod", image)
        before = wait(60, "statistics of the pod", lambda: rootfs(cluster, "pod"))
        # The push of the image, into a registry on the same disk, must not count.
        then = image_disk(cluster)["time"]
        wait(60, "another look at the disk", lambda: image_disk(cluster)["time"] != then)
        free = image_disk(cluster)["availableBytes"]
        cluster.exec("pod", "sh", "-c", "dd if=/dev/zero of=/written bs=1M count=30; cat /ballast > /dev/null; sync")
        after = wait(60, "the file to be counted", lambda: grown(cluster, before, 30 * MIB))
        less = wait(60, "what was read to be counted", lambda: shrunk(cluster, free, 70 * MIB))
    return (f"a file of 30 MiB counts {(after - before) // MIB} MiB for its container; with 48 MiB that were read of its image "
            f"{less // MIB} MiB less are available to images")


def rootfs(cluster, name):
    """What a pod's container has written, as the kubelet counts it."""
    for pod in cluster.summary()["pods"]:
        if pod["podRef"]["name"] == name:
            return pod["containers"][0]["rootfs"].get("usedBytes")
    return None


def grown(cluster, before, least):
    """The pod's count, once it is `least` more."""
    now = rootfs(cluster, "pod")
    return now if now and now - before >= least else None


def image_disk(cluster):
    """The disk of images as the kubelet sees it, by which it decides."""
    return cluster.summary()["node"]["runtime"]["imageFs"]


def shrunk(cluster, before, least):
    """How much less is left, once it is `least`."""
    less = before - image_disk(cluster)["availableBytes"]
    return less if less >= least else None


def ephemeral_storage(cluster):
    """A pod that writes more than its limit is evicted."""
    cluster.run("pod", f"{OPEN}/busybox:lazy", container={"resources": {"limits": {"ephemeral-storage": "20Mi"}}})
    cluster.run("other", f"{OPEN}/busybox:lazy")
    started = time.monotonic()
    cluster.exec("pod", "dd", "if=/dev/zero", "of=/written", "bs=1M", "count=60")
    wait(120, "the eviction", lambda: cluster.get("pod", "pod")["status"].get("reason") == "Evicted")
    expect(cluster.is_ready("other"), "another pod was evicted as well")
    return f"60 MB written with a limit of 20 MiB: evicted after {time.monotonic() - started:.0f} s, its neighbour not"


def image_collection(cluster):
    """A node under disk pressure removes images that no pod uses, and what only they have in the
    cache."""
    images = [cluster.images.variant("busybox", f"unused{number}", 96 * MIB) for number in range(3)]
    for number, image in enumerate(images):
        name = f"unused{number}"
        cluster.run(name, image)
        cluster.exec(name, "sh", "-c", "cat /ballast > /dev/null")
    cluster.run("used", f"{OPEN}/redis:lazy")
    cluster.delete(*(f"unused{number}" for number in range(3)))
    wait(60, "their containers to be gone", lambda: "unused" not in cluster.node.run("ctr", "-n", "k8s.io", "containers", "ls"))
    # It spares images that it has seen for the first time just now, but for those that it finds
    # when it starts.
    cluster.node.run("systemctl", "restart", "kubelet")
    wait(60, "the node to be Ready", cluster.node_is_ready)
    time.sleep(5)
    cached = cluster.status()["daemon"]["cache"]["bytes_used"]
    expect(cached >= 250 * MIB, f"the cache has {cached // MIB} MiB")
    free, size = cluster.node.free()
    threshold = size * 15 // 100
    filler = cluster.node.root / "filler"
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - threshold + 64 * MIB)
    try:
        wait(120, "the images to be removed", lambda: not any("unused" in mount["image"] for mount in cluster.status()["mounts"])
             and "unused" not in cluster.node.sh("ctr -n k8s.io images ls -q"))
        wait(60, "the cache to shrink", lambda: cluster.status()["daemon"]["cache"]["bytes_used"] < cached - 250 * MIB)
        wait(90, "the pressure to end", lambda: cluster.condition("DiskPressure") == "False")
        expect(cluster.is_ready("used"), "a pod was evicted although images could be removed")
        now = cluster.status()["daemon"]["cache"]["bytes_used"]
    finally:
        filler.unlink()
    return f"3 unused images removed, the cache went from {cached // MIB} to {now // MIB} MiB, the pressure ended, no pod was evicted"


SCENARIOS = [
    (statistics, "`stats/summary`"),
    (ephemeral_storage, "limit of `ephemeral-storage`"),
    (image_collection, "image garbage collection under disk pressure"),
]
