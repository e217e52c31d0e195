"""nerdctl 2, with networks of its own.

nerdctl passes on which image a layer belongs to only for snapshotters whose names it knows. So the
plugin is called stargz here, and once lazuli, which has to fail for the lazy image.
"""

import functools
import json
import os
import re
import subprocess
from pathlib import Path

from lab import REPOSITORY, corpus, run, wait_until
from lab.coldstart import image_size
from lab.lazuli import Lazuli
from scene import FORMS, TIMEOUT, expect, expect_failure, mb, same_trees, saw, scene

IMAGE = "redis"
PROGRAM = ["redis-server", "--version"]
# A file that a start of the image does not read.
UNREAD = "/usr/bin/perl"


def prepare(_work):
    """Make what needs a network."""
    corpus(IMAGE)
    for name in ("containerd", "nerdctl"):
        built = subprocess.check_output([REPOSITORY / "scripts" / name], text=True)
        os.environ[f"LAZULI_{name.upper()}"] = built.strip()


def main(work):
    for form in FORMS:
        with scene(work / form, "stargz") as node:
            doctor(node, "containerd knows the snapshotter as stargz")
            everything(node, form)
    with scene(work / "names", "lazuli") as node:
        doctor(node, "containerd knows the snapshotter")
        other_name(node)
    with scene(work / "convert", "stargz") as node:
        converted(node)


class Nerdctl:
    """`nerdctl` with what it keeps in the scene's directory."""

    def __init__(self, node, namespace="mine"):
        self.node = node
        # Containers are in cgroups with the namespace's name, which the test removes.
        self.namespace = f"{node.work.parent.name}-{namespace}"

    def command(self, *verb, snapshotter=None):
        work, program = self.node.work, Path(os.environ["LAZULI_NERDCTL"]) / "nerdctl"
        return [str(word) for word in (
            program, "--address", self.node.socket, "--namespace", self.namespace,
            "--data-root", work / "nerdctl", "--cni-netconfpath", work / "cni",
            "--cni-path", "/usr/lib/cni", "--cgroup-manager", "cgroupfs", "--insecure-registry",
            "--snapshotter", snapshotter or self.node.plugin, *verb)]

    def __call__(self, *verb, **options):
        return run(*self.command(*verb, **options)).decode()

    def run(self, reference, *command, **options):
        """The output of a container that has no network."""
        verb = ["run", "--rm", "--net", "none"]
        return self(*verb, reference, *command, **options)


def doctor(node, found):
    """Expect what `lazuli doctor` finds: it knows the plugin by its socket, not by its name."""
    verb = ["--config", node.work / "lazuli.toml", "doctor", "--containerd", node.socket]
    [row] = json.loads(node.lazuli(*verb, "--json", "plugin"))["checks"]
    expect((row["verdict"], row["found"]) == ("fine", found), f"{found}: {row}")


def everything(node, form):
    nerdctl, images = Nerdctl(node), node.publish(IMAGE, {"ordinary", form})
    image, size = images[form], image_size(images[form])
    with node.registry.counted() as traffic:
        nerdctl("pull", "--quiet", image)
        expect("v=" in nerdctl.run(image, *PROGRAM), "redis-server says its version")
    lazy = form != "ordinary"
    expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a start")
    saw("nerdctl pull, run", form, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")

    name = f"box-{form}"
    nerdctl("run", "--detach", "--name", name, "--net", "none", "--user", "root",
            image, "sleep", "10000")
    nerdctl("exec", name, "sh", "-c", "echo written > /new && rm /etc/debian_version")
    node.kill_worker()
    with node.registry.counted() as traffic:
        of_lazuli = nerdctl("exec", name, "sha256sum", UNREAD)
    expect((traffic.bytes > 0) == lazy, f"{traffic.bytes} bytes fetched for {UNREAD}")
    saw("nerdctl exec after kill -9 of the worker", form, f"{mb(traffic.bytes)} MB fetched")

    check = ["sh", "-c", "cat /new; ls /etc/debian_version || sha256sum " + UNREAD]
    committed = image.replace(":1", ":committed")
    nerdctl("commit", name, committed)
    before = nerdctl.run(committed, *check)
    expect(before == f"written\n{of_lazuli}", f"the committed image shows {before}")
    push(nerdctl, form, committed)
    nerdctl("rmi", "--force", committed)
    after = nerdctl.run(committed, *check)
    expect(after == before, f"the pushed image shows {after}")
    saw("nerdctl commit, push, run", form, "the container's changes are there; all was fetched")

    if form == "lazy":
        ours = image.replace(":1", ":ours")
        [key] = re.findall(r'"Id": "([0-9a-f]{64})"', nerdctl("inspect", name))
        with node.registry.counted() as traffic:
            node.lazuli("commit", key, ours)
        expect(nerdctl.run(ours, *check) == before, "what lazuli commit made shows the same")
        saw("lazuli commit of nerdctl's container", form, f"{mb(traffic.bytes)} MB fetched")
    nerdctl("rm", "--force", name)
    if form == "lazy":
        nerdctl("rmi", "--force", image, committed, ours)
        with node.registry.counted() as traffic:
            expect(nerdctl.run(committed, *check) == before, "the pushed image shows the same")
        expect(traffic.bytes < 0.7 * size, f"{traffic.bytes} of {size} bytes for the pushed image")
        saw("run of what nerdctl pushed", form, f"{mb(traffic.bytes)} MB fetched")

    compose(node, nerdctl, image)
    saw("nerdctl compose up, two services on a network", form, "they reach each other")

    overlayfs = Nerdctl(node, "other")
    overlayfs("pull", "--quiet", images["ordinary"], snapshotter="overlayfs")
    of_overlayfs = overlayfs.run(images["ordinary"], "sha256sum", UNREAD, snapshotter="overlayfs")
    expect(of_lazuli == of_overlayfs, f"{UNREAD}: {of_lazuli} and {of_overlayfs}")
    expected = node.tree(overlayfs.namespace, "overlayfs", images["ordinary"])
    shown = node.tree(nerdctl.namespace, node.plugin, image)
    saw("tree beside overlayfs", form, f"{same_trees(expected, shown)} entries are equal")


def push(nerdctl, form, reference):
    """Push an image. Unless told not to, nerdctl reads each layer to find its DiffID, which it
    takes for zstd if it begins as a chunk does."""
    if form == "lazy":
        expect_failure(lambda: nerdctl("push", "--quiet", reference), "magic number mismatch")
        saw("nerdctl push", form, "fails; works with --all-platforms")
        nerdctl("push", "--quiet", "--all-platforms", reference)
    else:
        nerdctl("push", "--quiet", reference)


def compose(node, nerdctl, image):
    """Two services, of which one asks the other."""
    file = node.work / "compose.yaml"
    ask = "until redis-cli -h db ping; do sleep 1; done; sleep 10000"
    common = f"image: {image}, stop_signal: SIGKILL"
    file.write_text(f"""services:
  db: {{{common}}}
  client: {{{common}, command: [sh, -c, "{ask}"]}}
""")
    composed = functools.partial(nerdctl, "compose", "--file", file, "--project-name", "test")
    composed("up", "--detach")
    try:
        wait_until(lambda: "PONG" in composed("logs", "--no-color", "client"), TIMEOUT, "PONG")
    finally:
        composed("down")


def other_name(node):
    """With a name that nerdctl does not know, images are ordinary."""
    nerdctl, images = Nerdctl(node), node.publish(IMAGE, {"indexed", "lazy"})
    with node.registry.counted() as traffic:
        nerdctl("pull", "--quiet", images["indexed"])
        nerdctl.run(images["indexed"], *PROGRAM)
    saw("nerdctl --snapshotter lazuli", "indexed", f"{mb(traffic.bytes)} MB fetched, as ordinary")
    expect(node.status()["mounts"] == [], "Lazuli has no image mounted")
    expect_failure(lambda: nerdctl("pull", "--quiet", images["lazy"]), "cri.image-ref")
    saw("nerdctl --snapshotter lazuli", "lazy", "refused, the message says why")


def converted(node):
    """`nerdctl image convert --nydus` with lazuli as its nydus-image."""
    nerdctl, image = Nerdctl(node), node.publish(IMAGE, {"ordinary"})["ordinary"]
    builder, nydus = node.work / "nydus-image", image.replace(":1", ":nydus")
    builder.symlink_to(Lazuli.BINARY)
    nerdctl("pull", "--quiet", image, snapshotter="overlayfs")
    nerdctl("image", "convert", "--nydus", "--oci", "--nydus-builder-path", builder,
            "--nydus-work-dir", node.work / "nydus", image, nydus)
    nerdctl("push", "--quiet", "--all-platforms", nydus)
    nerdctl("rmi", "--force", nydus)
    with node.registry.counted() as traffic:
        nerdctl("pull", "--quiet", nydus)
        expect("v=" in nerdctl.run(nydus, *PROGRAM), "redis-server says its version")
    size = image_size(nydus)
    expect(traffic.bytes < 0.7 * size, f"{traffic.bytes} of {size} bytes for a start")
    saw("nerdctl image convert --nydus, push, run", "lazy",
        f"{mb(traffic.bytes)} of {mb(size)} MB fetched")
