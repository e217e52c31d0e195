"""Harbor's acceleration service, with lazuli as the nydus-image that it calls.

Its daemon, acceld, converts what a registry's webhook names, or accelctl with the same request, and
pushes it under another tag. accelctl also converts by itself.
"""

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path

from lab import REPOSITORY, background, corpus, run
from lab.coldstart import image_size
from lab.lazuli import Lazuli
from lab.registry import free_address
from nerdctl import PROGRAM, Nerdctl
from scene import TIMEOUT, expect, expect_failure, mb, same_trees, saw, scene

IMAGE = "redis"

# As its documentation has it, but for addresses and directories.
CONFIG = """\
server:
  name: API
  host: {host}
  port: {port}
metric:
  enabled: true
provider:
  source:
    {registry}:
      insecure: false
      webhook:
        auth_header: header
  work_dir: {work}
  gcpolicy:
    threshold: 1000MB
  cache_size: 200
  cache_version: v1
converter:
  worker: 5
  harbor_annotation: true
  driver:
    type: nydus
    config:
      work_dir: {work}
      builder: {builder}
      with_referrer: true
      {driver}
  rules:
    - tag_suffix: -nydus
    - cache_tag: nydus-cache
"""


def prepare(_work):
    """Make what needs a network."""
    corpus(IMAGE)
    for name in ("containerd", "nerdctl", "acceld"):
        built = subprocess.check_output([REPOSITORY / "scripts" / name], text=True)
        os.environ[f"LAZULI_{name.upper()}"] = built.strip()


def main(work):
    with scene(work / "scene", "stargz") as node:
        everything(node)


def program(name):
    return Path(os.environ["LAZULI_ACCELD"]) / name


def configured(node, name, driver=""):
    """A configuration file with a directory of its own, and the address that it has acceld listen
    at. The driver has one more option."""
    work, address, builder = node.work / name, free_address(), node.work / "nydus-image"
    work.mkdir()
    if not builder.exists():
        builder.symlink_to(Lazuli.BINARY)
    host, _, port = address.rpartition(":")
    file = work / "config.yaml"
    file.write_text(CONFIG.format(host=host, port=port, work=work, builder=builder,
                                  registry=node.registry.address, driver=driver))
    return file, address


@contextlib.contextmanager
def acceld(node):
    """A running acceld; yields its address."""
    file, address = configured(node, "acceld")

    def ready():
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://{address}/api/v1/health", timeout=5) as answer:
                return answer.status == 200

    with background(program("acceld"), "--config", file, log=node.work / "acceld.log",
                    timeout=TIMEOUT, ready=ready):
        yield address


def everything(node):
    images = node.publish(IMAGE, {"ordinary", "alone"})
    image, alone = images["ordinary"], images["alone"]
    converted, size = f"{image}-nydus", image_size(image)
    with acceld(node) as address:
        task = [program("accelctl"), "task", "--addr", address]
        began = time.monotonic()
        run(*task, "create", "--sync", image)
        seconds = time.monotonic() - began
        expect("COMPLETED" in run(*task, "list").decode(), "the task is done")
    saw("accelctl task create", "lazy", f"{seconds:.1f} s, {mb(image_size(converted))} MB")
    made = manifest(converted)
    noted = made["annotations"]["containerd.io/snapshot/nydus-builder-version"]
    expect("Lazuli" in noted, f"Lazuli in {noted}")
    started(node, image, converted)

    def convert(name, image, driver=""):
        file, _ = configured(node, name, driver)
        run(program("accelctl"), "convert", "--config", file, image)

    convert("alone", alone)
    expect(manifest(f"{alone}-nydus")["layers"] == made["layers"], "the same layers")
    saw("accelctl convert", "lazy", "the layers are acceld's")
    with node.registry.counted() as traffic:
        convert("again", image)
    expect(traffic.bytes < 0.7 * size, f"{traffic.bytes} of {size} bytes with the cache")
    saw("again, with the cache in the registry", "lazy",
        f"{mb(traffic.bytes)} of {mb(size)} MB fetched")
    expect_failure(lambda: convert("reference", alone, "oci_ref: true"), "targz-ref")
    saw("accelctl convert with oci_ref", "lazy", "refused")


def started(node, image, converted):
    """Expect that a start of what was converted fetches a part, and that nothing is missing."""
    nerdctl, size = Nerdctl(node), image_size(converted)
    with node.registry.counted() as traffic:
        nerdctl("pull", "--quiet", converted)
        expect("v=" in nerdctl.run(converted, *PROGRAM), "redis-server says its version")
    expect(traffic.bytes < 0.7 * size, f"{traffic.bytes} of {size} bytes for a start")
    saw("nerdctl pull, run", "lazy", f"{mb(traffic.bytes)} of {mb(size)} MB fetched")

    overlayfs = Nerdctl(node, "other")
    overlayfs("pull", "--quiet", image, snapshotter="overlayfs")
    expected = node.tree(overlayfs.namespace, "overlayfs", image)
    shown = node.tree(nerdctl.namespace, node.plugin, converted)
    saw("tree beside overlayfs", "lazy", f"{same_trees(expected, shown)} entries are equal")


def manifest(reference):
    """An image's manifest in the registry."""
    raw = run("skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{reference}")
    return json.loads(raw)
