"""A node that was delivered with images, and boots without their registries."""

import shutil
import time

from ..images import OPEN
from ..shell import wait
from ..table import expect

# The ordinary one has a layer that no other image on the node has.
LAZY, ORDINARY, SIZE = "redis", "python-slim", 1 << 20


def delivered(cluster):
    """Pods on an image of each form, neither of which the node has ever pulled."""
    node, images = cluster.node, cluster.images
    ordinary = f"{OPEN}/{ORDINARY}:delivered"
    lazy = images.variant(LAZY, "delivered", SIZE)
    images.copy(f"oci:{cluster.corpus}/{ORDINARY}:latest", ordinary)
    bundle = node.root / "var/lib/lazuli/bundle"
    node.beside(cluster.lazuli, "--root", node.scratch / "builder", "bundle", "--to", bundle, lazy, ordinary)
    registries = "registry@open registry@private"
    node.sh(f"systemctl mask {registries}")
    try:
        node.reboot()
        booted = time.monotonic()
        expect(not node.sh("curl -s 127.0.0.1:5000/v2/ && echo yes || true"), "the registry is there")
        wait(120, "the API server", lambda: cluster.kubectl("get", "nodes"))
        cluster.start("lazy", lazy)
        cluster.start("ordinary", ordinary)
        cluster.ready("lazy")
        first = time.monotonic() - booted
        cluster.ready("ordinary")
        both = time.monotonic() - booted
        expect("v=" in cluster.exec("lazy", "redis-server", "--version"), "redis-server says its version")
        read = cluster.exec("lazy", "sh", "-c", "wc -c < /ballast")
        expect(int(read) == SIZE, f"/ballast has {read} bytes")
        expect(cluster.mount_of(ordinary), "the ordinary image is not mounted")
    finally:
        node.sh(f"systemctl unmask {registries} && systemctl start {registries}")
        shutil.rmtree(bundle)
    return (f"without a registry, Ready {first:.0f} s (lazy) and {both:.0f} s (ordinary, not unpacked) "
            "after the node's system is up")


SCENARIOS = [(delivered, "images delivered with the node")]
