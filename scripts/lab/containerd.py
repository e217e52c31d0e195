"""A containerd of our own, asked as Kubernetes asks it, with containerd's overlayfs snapshotter or with lazuli."""

import contextlib
import datetime
import os
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from . import CommandFailed, background, drop_caches, run, wait_until
from .lazuli import Lazuli

SNAPSHOTTERS = ("overlayfs", "lazuli")
TIMEOUT = 600

# Without the plugins that look at places of the machine's own containerd.
CONFIG = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]

[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"

[proxy_plugins.lazuli]
  type = "snapshot"
  address = "{snapshotter_socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{work}"
    conf_dir = "{work}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    disable_snapshot_annotations = false
"""

PAUSE = "lazuli.example/pause:1"


@dataclass
class Start:
    """One cold start through containerd: seconds from the pull's beginning to its end and to the output that was waited
    for, and what the registry sent meanwhile."""

    image: str
    snapshotter: str
    pulled: float
    ready: float
    requests: int
    bytes: int


class Node:
    """A containerd with a root, a state and a socket of its own."""

    def __init__(self, work):
        self.work, self.socket = work, work / "containerd.sock"
        self.process = None

    def cri(self, *verb, **environment):
        """Ask containerd's CRI service; returns what the client prints."""
        return run(cri_program(), self.socket, *verb, env=os.environ | environment)

    def remove(self, pod):
        """Remove a pod, as the kubelet does: again, if containerd was just seeing its container end."""
        try:
            self.cri("rm", pod)
        except CommandFailed:
            self.cri("rm", pod)

    def start(self, server, image, reference, snapshotter, argv, expect):
        """Pull an image of a registry and start `argv` in a pod, until it has printed `expect`."""
        logs = self.work / "logs"
        logs.mkdir()
        drop_caches()
        with server.counted() as traffic:
            began = time.time()
            self.cri("pull", reference)
            pulled = time.time() - began
            pod = self.cri("start", "pod", reference, *argv, CRI_LOGS=str(logs)).decode().split()
            ready = printed(logs / "log", expect) - began
        self.remove(pod[0])
        return Start(image, snapshotter, pulled, ready, traffic.requests, traffic.bytes)

    def clean_up(self):
        """Remove the pods that a failure left, and shims without a pod."""
        for line in self.cri("ps").decode().splitlines():
            self.cri("rm", line.split()[0])
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = process.joinpath("cmdline").read_bytes().split(b"\0")
                if b"containerd-shim" in words[0] and os.fsencode(self.socket) in words:
                    os.kill(int(process.name), signal.SIGKILL)


def cri_program():
    """The test kit's client, next to the lazuli that is measured unless CRI names it."""
    return Path(os.environ.get("CRI", Lazuli.BINARY.parent / "cri"))


@contextlib.contextmanager
def node(work, snapshotter, **environment):
    """A node that has nothing of any image but the one of sandboxes; all of it is gone afterwards."""
    work.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        snapshotter_socket = work / "lazuli.sock"
        if snapshotter == "lazuli":
            stack.enter_context(service(work, snapshotter_socket))
        this = Node(work)
        config = work / "containerd.toml"
        config.write_text(CONFIG.format(work=work, root=work / "root", state=work / "state", socket=this.socket, pause=PAUSE,
                                        snapshotter=snapshotter, snapshotter_socket=snapshotter_socket))
        this.process = stack.enter_context(background(containerd_program(), "--config", config, log=work / "containerd.log",
                                                      ready=lambda: listens(this.socket), env=os.environ | environment))
        stack.callback(this.clean_up)
        run(cri_program(), "pause", PAUSE, work / "pause.tar")
        run("ctr", "--address", this.socket, "--namespace", "k8s.io", "image", "import", "--snapshotter", snapshotter,
            work / "pause.tar")
        yield this


@contextlib.contextmanager
def service(work, address):
    """Lazuli's daemon, serving containerd."""
    config, instance = work / "lazuli.toml", Lazuli(work / "lazuli")
    config.write_text(f'[snapshotter]\naddress = "{address}"\n')
    instance.root.mkdir()
    command = [instance.BINARY, "--root", instance.root, "--config", config, "daemon"]
    with background(*command, log=work / "lazuli.log", ready=lambda: listens(address)):
        try:
            yield instance
        finally:
            instance.stop()


def containerd_program():
    """The containerd that is measured: the system's, or that of CONTAINERD."""
    return os.environ.get("CONTAINERD", "containerd")


def containerd_version():
    """What it says of itself."""
    return run(containerd_program(), "--version").decode().split()[2]


def listens(path):
    """Whether somebody accepts connections at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def printed(log, expect):
    """When a container printed a text, by its CRI log, whose lines are `TIME STREAM TAG TEXT`."""
    found = []

    def look():
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        found[:] = [line for line in lines if expect in line]
        return bool(found)

    wait_until(look, TIMEOUT, f"{expect!r} in {log}")
    return datetime.datetime.fromisoformat(found[0].split()[0]).timestamp()
