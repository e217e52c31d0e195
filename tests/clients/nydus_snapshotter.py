"""nydus-snapshotter, with lazuli as the nydusd that it starts and the nydus-image that it calls."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

from lab import REPOSITORY, background, corpus, run, wait_until
from lab.coldstart import image_size
from lab.containerd import listens
from lab.lazuli import Lazuli
from lab.nydus import configure
from nerdctl import PROGRAM, Nerdctl
from scene import CONTAINERD, ON_DEMAND, TIMEOUT, expect, lazuli, mb, same_trees, saw

IMAGE = "redis"
MODES = {"dedicated": "a process for each image", "shared": "one process"}

# The node's Lazuli has another state directory than the default one.
WRAPPER = """\
#!/bin/bash
exec -a nydusd '{lazuli}' --root '{work}/lazuli' "$@"
"""


def prepare(_work):
    """Make what needs a network."""
    corpus(IMAGE)
    for name in ("containerd", "nerdctl", "contenders"):
        built = subprocess.check_output([REPOSITORY / "scripts" / name], text=True)
        os.environ[f"LAZULI_{name.upper()}"] = built.strip()


def main(work):
    for mode, what in MODES.items():
        with lazuli(work / mode, ON_DEMAND) as node:
            everything(node, mode, what)


def program(name):
    return Path(os.environ["LAZULI_CONTENDERS"]) / name


@contextlib.contextmanager
def snapshotter(node, mode):
    """A running snapshotter, which leaves its processes and mounts."""
    work, address = node.work, node.work / "nydus.sock"
    config = configure(work, work / "nydus-image", mode, cleanup=False, system=True)
    command = [program("containerd-nydus-grpc"), "--config", config]
    with contextlib.suppress(FileNotFoundError):
        address.unlink()
    with background(*command, log=work / "nydus.log", timeout=TIMEOUT,
                    ready=lambda: listens(address)) as process:
        yield process


@contextlib.contextmanager
def containerd(node):
    config = CONTAINERD.format(work=node.work, plugin="nydus")
    config = config.replace(f'"{node.work}/lazuli.sock"', f'"{node.work}/nydus.sock"')
    config = config.replace(f'"{node.work}/lazuli"', f'"{node.work}/nydus"')
    (node.work / "containerd.toml").write_text(config)
    programs = Path(os.environ["LAZULI_CONTAINERD"])
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    with background(programs / "containerd", "--config", node.work / "containerd.toml",
                    log=node.work / "containerd.log", env=environment, timeout=TIMEOUT,
                    ready=lambda: listens(node.socket)):
        yield


def everything(node, mode, what):
    node.plugin, work = "nydus", node.work
    (work / "nydus-image").symlink_to(Lazuli.BINARY)
    for name in "nydusd", "nydusd-new":
        (work / name).write_text(WRAPPER.format(lazuli=Lazuli.BINARY, work=work))
        (work / name).chmod(0o755)
    ordinary = node.publish(IMAGE, {"ordinary", "lazy"})
    converted = convert(node)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(snapshotter(node, mode))
        stack.enter_context(containerd(node))
        nerdctl = Nerdctl(node)
        started(node, nerdctl, what, "lazuli convert", ordinary["lazy"])
        started(node, nerdctl, what, "its converter", converted)
        same(node, nerdctl, what, ordinary["ordinary"], converted)
        survive(node, nerdctl, what, converted, first, lambda: snapshotter(node, mode))


def convert(node):
    """The image as the snapshotter's converter makes it, with lazuli as its nydus-image."""
    layout, reference = node.work / "converted", f"{node.registry.address}/converted/{IMAGE}:1"
    run(program("contender-nydus-convert"), "--builder", node.work / "nydus-image",
        corpus(IMAGE) / IMAGE, layout)
    run("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false",
        f"oci:{layout}:latest", f"docker://{reference}")
    return reference


def started(node, nerdctl, what, maker, image):
    """Expect that a start fetches a part of an image."""
    size = image_size(image)
    with node.registry.counted() as traffic:
        nerdctl("pull", "--quiet", image)
        expect("v=" in nerdctl.run(image, *PROGRAM), "redis-server says its version")
    expect(traffic.bytes < 0.7 * size, f"{traffic.bytes} of {size} bytes for a start")
    saw(f"pull, run, {what}", maker, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")


def same(node, nerdctl, what, ordinary, image):
    """Expect that overlayfs shows the same files."""
    overlayfs = Nerdctl(node, "other")
    overlayfs("pull", "--quiet", ordinary, snapshotter="overlayfs")
    expected = node.tree(overlayfs.namespace, "overlayfs", ordinary)
    shown = node.tree(nerdctl.namespace, node.plugin, image)
    saw(f"tree beside overlayfs, {what}", "its converter",
        f"{same_trees(expected, shown)} entries are equal")


def survive(node, nerdctl, what, image, first, again):
    """Expect that a container reads on whatever dies, and that others start."""
    nerdctl("run", "--detach", "--name", "box", "--net", "none", "--user", "root",
            image, "sleep", "10000")
    read = lambda file: nerdctl("exec", "box", "sha256sum", file)

    def works(after, file):
        read(file)
        expect("v=" in nerdctl.run(image, *PROGRAM), f"a new container after {after}")
        saw(f"{after}, {what}", "its converter", "the container reads on, and another one starts")

    for process in nydusds(node):
        os.kill(process, signal.SIGKILL)
    read("/usr/bin/perl")
    wait_until(lambda: is_running(node), TIMEOUT, "another nydusd")
    works("kill -9 of nydusd", "/usr/bin/tar")
    node.kill_worker()
    works("kill -9 of the worker", "/usr/bin/apt-get")
    before = nydusds(node)
    upgrade(node)
    expect(not before & nydusds(node), "other processes after the upgrade")
    works("an upgrade of nydusd", "/usr/bin/apt")
    first.kill()
    first.wait()
    with again():
        works("kill -9 of the snapshotter", "/usr/bin/dpkg")
        nerdctl("rm", "--force", "box")
        nerdctl("image", "prune", "--all", "--force")
        gone = lambda: not node.status()["mounts"]
        wait_until(gone, TIMEOUT, "the end of all mounts")
    saw(f"image prune, {what}", "its converter", "nothing is mounted any more")
    for process in nydusds(node):
        os.kill(process, signal.SIGTERM)


def nydusds(node):
    """The processes of the name nydusd that serve this node."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"nydusd" and str(node.work / "lazuli").encode() in words:
                found.add(int(directory.name))
    return found


def is_running(node):
    """Whether each process with a socket answers, and serves."""
    sockets = list((node.work / "nydus/socket").glob("*/*.sock"))
    with contextlib.suppress(OSError):
        return bool(sockets) and all(
            json.loads(ask(path, "GET", "/api/v1/daemon"))["state"] == "RUNNING"
            for path in sockets)
    return False


def upgrade(node):
    """Have the snapshotter replace its processes, as an operator does."""
    body = json.dumps({"nydusd_path": str(node.work / "nydusd-new"), "version": "", "policy": ""})
    ask(node.work / "nydus-system.sock", "PUT", "/api/v1/daemons/upgrade", body)
    wait_until(lambda: len(nydusds(node)) > 0, TIMEOUT, "an upgraded nydusd")


def ask(path, method, url, body=None):
    """The answer of an API at a Unix socket."""
    connection = http.client.HTTPConnection("unix", timeout=TIMEOUT)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(TIMEOUT)
    connection.sock.connect(str(path))
    with contextlib.closing(connection):
        connection.request(method, url, body)
        answer = connection.getresponse()
        text = answer.read()
        expect(answer.status in (200, 204), f"{method} {url}: {answer.status} {text}")
        return text
