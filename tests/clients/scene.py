"""A node with containerd and Lazuli, a registry with an image in three forms, and what was seen."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

from lab import CommandFailed, background, corpus, run, wait_until
from lab.containerd import listens
from lab.lazuli import Lazuli
from lab.registry import registry

TIMEOUT = 120

CONTAINERD = """\
version = 3
root = "{work}/containerd"
state = "{work}/run"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri",
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"]

[grpc]
  address = "{work}/containerd.sock"
[ttrpc]
  address = "{work}/containerd.sock.ttrpc"

[proxy_plugins.{plugin}]
  type = "snapshot"
  address = "{work}/lazuli.sock"
  [proxy_plugins.{plugin}.exports]
    root = "{work}/lazuli"
    enable_remote_snapshot_annotations = "true"
"""

LAZULI = """\
policy = "{work}/policy.toml"
hosts_dir = "{work}/hosts"
[snapshotter]
address = "{work}/lazuli.sock"
"""

# Only what is read is fetched, so that what is fetched shows what is lazy.
ON_DEMAND = """\
[prefetch]
ahead = "nothing"
rest_bytes_per_second = 0
"""

FORMS = ["ordinary", "indexed", "lazy"]


def expect(condition, what):
    """Fail unless something holds."""
    if not condition:
        raise AssertionError(f"expected: {what}")


def expect_failure(action, message):
    """Expect that a command fails, with a message."""
    try:
        action()
    except CommandFailed as error:
        expect(message in str(error), f"{message} in: {error}")
    else:
        expect(False, f"a failure: {message}")


def same_trees(one, other):
    """Expect the same entries, but for the root's time, which is that of the mount; returns how
    many there are."""
    differing = [pair for pair in zip(one[1:], other[1:]) if pair[0] != pair[1]]
    expect(len(one) == len(other) and not differing, f"no difference: {differing[:3]}")
    return len(one)


def saw(what, form, result):
    """Print what was seen of an image."""
    print(f"{what}: {form}: {result}", flush=True)


def mb(count):
    """Bytes as MB."""
    return f"{count / 1e6:.1f}"


class Scene:
    """What a test has: directories, programs and images."""

    def __init__(self, work, server, plugin, key):
        self.work, self.registry, self.plugin, self.key = work, server, plugin, key
        self.socket = work / "containerd.sock"
        self.lazuli = Lazuli(work / "lazuli")
        self.repositories = []

    def ctr(self, namespace, *verb):
        ctr = Path(os.environ["LAZULI_CONTAINERD"]) / "ctr"
        return run(ctr, "--address", self.socket, "--namespace", namespace, *verb).decode()

    def status(self):
        return json.loads(self.lazuli("status", "--json"))

    def kill_worker(self):
        """`kill -9` of the worker; returns when the keeper has started another one."""
        before = self.status()["daemon"]["worker_pid"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.worker() not in (None, before), TIMEOUT, "another worker")

    def worker(self):
        status = subprocess.run(self.lazuli.command("status", "--json"), capture_output=True)
        return json.loads(status.stdout)["daemon"]["worker_pid"] if status.returncode == 0 else None

    def publish(self, name, forms=FORMS):
        """An image of the corpus, once as it is, once with an index, once converted."""
        layout = f"oci:{corpus(name) / name}"
        repositories = {form: f"{self.registry.address}/{form}/{name}" for form in forms}
        self.repositories += repositories.values()
        references = {form: f"{repository}:1" for form, repository in repositories.items()}
        for form, reference in references.items():
            if form == "lazy":
                self.lazuli("convert", f"{layout}:latest", reference)
            else:
                self.lazuli("copy", f"{layout}:latest", reference)
            if form == "indexed":
                self.lazuli("index", reference, "--sign", self.key)
        return references

    def tree(self, namespace, snapshotter, reference):
        """Every entry of an image that was pulled, as a list."""
        chain = self.chain_id(namespace, reference)
        snapshot, directory = ["snapshot", "--snapshotter", snapshotter], self.work / "tree"
        directory.mkdir(exist_ok=True)
        self.ctr(namespace, *snapshot, "prepare", "tree", chain)
        mount = self.ctr(namespace, *snapshot, "mounts", directory, "tree")
        run("sh", "-c", mount)
        try:
            lines = run(Lazuli.BINARY.parent / "treelist", directory).decode(errors="replace")
        finally:
            run("umount", directory)
            self.ctr(namespace, *snapshot, "rm", "tree")
        return lines.splitlines()

    def chain_id(self, namespace, reference):
        """The name of the snapshot that has all layers of an image."""
        lines = self.ctr(namespace, "image", "ls").splitlines()
        digest = next(line.split()[2] for line in lines if line.split()[0] == reference)
        content = lambda digest: json.loads(self.ctr(namespace, "content", "get", digest))
        manifest = content(digest)
        if "manifests" in manifest:
            manifest = content(manifest["manifests"][0]["digest"])
        chain, *above = content(manifest["config"]["digest"])["rootfs"]["diff_ids"]
        for diff_id in above:
            chain = "sha256:" + hashlib.sha256(f"{chain} {diff_id}".encode()).hexdigest()
        return chain


@contextlib.contextmanager
def scene(work, plugin="lazuli", settings=ON_DEMAND, images=None, config=CONTAINERD):
    """All of it, running, in a directory that is made. `images` is another scene, which has the
    registry and the indexer's key; containerd has the configuration `config`."""
    with contextlib.ExitStack() as stack:
        it = stack.enter_context(lazuli(work, settings, images, plugin))
        (work / "containerd.toml").write_text(config.format(work=work, plugin=plugin))
        programs = Path(os.environ["LAZULI_CONTAINERD"])
        # The shim of the same containerd.
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        containerd = [programs / "containerd", "--config", work / "containerd.toml"]
        stack.enter_context(background(*containerd, log=work / "containerd.log", env=environment,
                                       timeout=TIMEOUT, ready=lambda: listens(it.socket)))
        yield it


@contextlib.contextmanager
def lazuli(work, settings=ON_DEMAND, images=None, plugin=None):
    """The same without containerd."""
    work.mkdir()
    with contextlib.ExitStack() as stack:
        key = images.key if images else new_key(work / "key")
        server = images.registry if images else stack.enter_context(registry(work / "registry"))
        # The registry may have another address for the node.
        signed = f"signed_as = {images.repositories}\n" if images else ""
        policy = f'[default]\naccept = true\nstatements = ["{key}.pub"]\n{signed}'
        (work / "policy.toml").write_text(policy)
        (work / "lazuli.toml").write_text(LAZULI.format(work=work) + settings)
        (work / "lazuli").mkdir()
        it = Scene(work, server, plugin, key)
        daemon = [*it.lazuli.command("--config", work / "lazuli.toml"), "daemon"]
        stack.enter_context(background(*daemon, log=work / "lazuli.log", timeout=TIMEOUT,
                                       ready=lambda: listens(work / "lazuli.sock")))
        stack.callback(it.lazuli.stop)
        yield it


def new_key(path):
    """The key of an indexer; the public one is beside it."""
    kind = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    run("openssl", "genpkey", *kind, "-out", path)
    run("openssl", "pkey", "-in", path, "-pubout", "-out", f"{path}.pub")
    return path
