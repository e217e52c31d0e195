"""A private containerd, with the requests of Kubernetes."""

import contextlib
import datetime
import functools
import os
import shutil
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import CommandFailed, background, drop_caches, run, used, wait_until
from .lazuli import Lazuli
from .workload import answers

TIMEOUT = 120

# Without the plugins that have one place for the whole machine.
CONFIG = """\
version = {version}
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]

[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
"""

CRI_1 = """
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{work}"
    conf_dir = "{work}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    disable_snapshot_annotations = false
"""

CRI_2 = """
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{snapshotter}"
  disable_snapshot_annotations = false
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{work}"]
    conf_dir = "{work}/cni"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/amd64"
  snapshotter = "{snapshotter}"
"""

HOSTS = """
[plugins."{images}".registry]
  config_path = "{hosts}"
"""

PROXY = """
[proxy_plugins.{snapshotter}]
  type = "snapshot"
  address = "{address}"
"""

# A snapshotter elsewhere is told what its layers are; 1.x needs no permission for that.
EXPORTS = """\
  [proxy_plugins.{snapshotter}.exports]
    enable_remote_snapshot_annotations = "true"
"""

PAUSE = "lazuli.example/pause:1"


@dataclass
class Service:
    """A snapshotter of a node. What is not containerd's own has a socket, and processes, which may
    change. `hosts` is a directory of hosts.toml files."""

    snapshotter: str
    socket: Path | None = None
    processes: callable = field(default=list)
    hosts: Path | None = None


@dataclass
class Start:
    """One cold start through containerd: seconds from the begin of the pull to its end, until the
    container was started, and until it was ready; what the registry sent meanwhile, what the node's
    daemons used, and what they held then."""

    pulled: float
    created: float
    ready: float
    requests: int
    bytes: int
    cpu: float
    rss: int


class Node:
    """A containerd with a root, a state and a socket of its own."""

    def __init__(self, work, service):
        self.work, self.socket, self.service = work, work / "containerd.sock", service
        self.process = None

    def cri(self, *verb, **environment):
        """Ask containerd's CRI service; returns what the client prints."""
        return run(cri_program(), self.socket, *verb, env=os.environ | environment)

    def remove(self, pod):
        """Remove a pod, as the kubelet does: again, if containerd was just seeing its container
        end."""
        try:
            self.cri("rm", pod)
        except CommandFailed:
            self.cri("rm", pod)

    def start(self, server, reference, ready, argv=()):
        """Pull an image of a registry and start it in a pod, or `argv` of it, until it is ready (as
        in lab.workload)."""
        drop_caches()
        before = used(self.daemons())
        with server.counted() as traffic:
            began = time.time()
            self.cri("pull", reference)
            pulled = time.time() - began
            created, done = self.run(reference, ready, argv)
            cpu, rss = used(self.daemons()) - before, sum(map(resident, self.daemons()))
        return Start(pulled, created - began, done - began, traffic.requests, traffic.bytes, cpu, rss)

    def run(self, reference, ready, argv=()):
        """Start an image that is here in a pod; returns when the container was started, and when it
        was ready."""
        logs = self.work / "logs"
        logs.mkdir()
        pod = self.cri("start", "pod", reference, *argv, CRI_LOGS=str(logs)).decode().split()[0]
        created = time.time()
        try:
            kind, what = ready
            done = answered(what) if kind == "http" else printed(logs / "log", what)
        finally:
            self.remove(pod)
            shutil.rmtree(logs)
        return created, done

    def daemons(self):
        """The processes of containerd and of the snapshotter."""
        return [self.process.pid, *self.service.processes()]

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
def node(work, contender, **environment):
    """A node that has nothing of any image but the one of sandboxes, with the snapshotter of a
    contender (see bench/lazuli_bench/contenders); all of it is gone afterwards."""
    work.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        work.joinpath("service").mkdir()
        # containerd watches this directory and logs what happens in it, so no log may be there.
        work.joinpath("cni").mkdir()
        service = stack.enter_context(contender.service(work / "service"))
        this = Node(work, service)
        config = work / "containerd.toml"
        config.write_text(configuration(work, this.socket, service))
        # ctr and the shim of the same containerd.
        path = f"{Path(containerd_program()).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path} | environment
        this.process = stack.enter_context(background(containerd_program(), "--config", config, log=work / "containerd.log",
                                                      ready=lambda: listens(this.socket), env=environment))
        stack.callback(this.clean_up)
        run(cri_program(), "pause", PAUSE, work / "pause.tar")
        run("ctr", "--address", this.socket, "--namespace", "k8s.io", "image", "import", "--snapshotter",
            service.snapshotter, work / "pause.tar", env=environment)
        wait_until(lambda: PAUSE.encode() in this.cri("images"), TIMEOUT, "the image of sandboxes")
        yield this


def configuration(work, socket, service):
    """containerd's, for a snapshotter."""
    current = int(containerd_version().lstrip("v").split(".")[0]) >= 2
    text = CONFIG + (CRI_2 if current else CRI_1)
    if service.socket:
        text += PROXY + (EXPORTS if current else "")
    if service.hosts:
        text += HOSTS
    images = "io.containerd.cri.v1.images" if current else "io.containerd.grpc.v1.cri"
    return text.format(images=images, hosts=service.hosts, version=3 if current else 2, work=work, root=work / "root", state=work / "state", socket=socket,
                       pause=PAUSE, snapshotter=service.snapshotter, address=service.socket)


def containerd_program():
    """The containerd that is measured: the system's, or that of CONTAINERD."""
    return shutil.which(os.environ.get("CONTAINERD", "containerd"))


@functools.cache
def containerd_version():
    """What it says of itself."""
    return run(containerd_program(), "--version").decode().split()[2].partition("+")[0]


def listens(path):
    """Whether a process accepts connections at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def resident(process):
    """Bytes of memory that a process holds."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


def answered(where):
    """When PORT/PATH of the loopback interface answered HTTP for the first time."""
    wait_until(lambda: answers(where), TIMEOUT, where)
    return time.time()


def printed(log, expect):
    """When a container printed a text, by its CRI log, whose lines are `TIME STREAM TAG TEXT`."""
    found = []

    def look():
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        found[:] = [line for line in lines if expect in line]
        return bool(found)

    wait_until(look, TIMEOUT, f"{expect!r} in {log}")
    return datetime.datetime.fromisoformat(found[0].split()[0]).timestamp()
