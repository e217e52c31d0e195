"""Pulls that begin at the node's mirror, of a registry whose name only the node's daemon knows."""

import shutil

from lab import run
from lab.coldstart import image_size
from scene import expect, mb, saw

LISTEN = "127.0.0.1:5444"
SETTINGS = f'[mirror]\nlisten = "{LISTEN}"\n'


def set_up(node, registry, client):
    """What docs/mirror.md has an administrator do for a `client`: "containers" or "docker"."""
    hosts, etc = node.work / "hosts", node.work / "etc"
    (hosts / registry).mkdir(parents=True)
    (hosts / registry / "hosts.toml").write_text(f'server = "http://{node.registry.address}"\n')
    node.lazuli("--config", node.work / "lazuli.toml", "setup", "mirror")
    certificates = etc / client / "certs.d" / LISTEN
    certificates.mkdir(parents=True)
    made = node.lazuli.root / "mirror"
    shutil.copy(made / "ca.pem", certificates / "ca.crt")
    for name in ("client.cert", "client.key"):
        shutil.copy(made / "client.pem", certificates / name)
    # Beside what the machine has there, and for this client alone.
    (node.work / "changes").mkdir()
    (node.work / "scratch").mkdir()
    run("mount", "-t", "overlay", "-o",
        f"lowerdir={etc}:/etc,upperdir={node.work}/changes,workdir={node.work}/scratch",
        "overlay", "/etc")


def pulled(node, client, pull, image):
    """Expect that a pull has the bytes of an image, and has them from the mirror."""
    with node.registry.counted() as traffic:
        pull()
    passed, size = node.status()["mirror"]["bytes"], image_size(image)
    expect(size <= traffic.bytes < 1.02 * size, f"{traffic.bytes} bytes for an image of {size}")
    expect(passed >= size, f"{passed} bytes were passed on")
    saw(f"{client} pull through the mirror", "ordinary", f"{mb(traffic.bytes)} of {mb(size)} MB fetched")
