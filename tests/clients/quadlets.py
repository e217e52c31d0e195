"""A service that podman's quadlet makes of a container, on a Debian 13 that systemd boots."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from lab import REPOSITORY, CommandFailed, run, wait_until
from lab.coldstart import image_size
from lab.lazuli import Lazuli
from lab.registry import registry
from podman import REGISTRIES, UNREAD
from scene import ON_DEMAND, TIMEOUT, expect, mb, saw

CLONE_NEWNET = 0x40000000

# What is read stays for the next boot, however full this disk is.
LAZULI = f"""\
[layers]
[cache]
keep_free = "1%"
{ON_DEMAND}"""

# What docs/clients.md says.
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
[storage.options]
additionallayerstores = ["/var/lib/lazuli/layer-store:ref"]
"""

QUADLET = """\
[Unit]
After=lazuli.service
[Container]
Image={image}
Network=host
[Install]
WantedBy=multi-user.target
"""


def install(system):
    """Make a system a node: Lazuli, its service, and what podman has to know."""
    shutil.copy(Lazuli.BINARY, system / "usr/bin/lazuli")
    units = system / "etc/systemd/system"
    shutil.copy(REPOSITORY / "dist/lazuli.service", units)
    (units / "multi-user.target.wants/lazuli.service").symlink_to("../lazuli.service")
    (system / "etc/lazuli").mkdir()
    (system / "etc/lazuli/config.toml").write_text(LAZULI)
    (system / "etc/containers/storage.conf").write_text(STORAGE)
    # The groups of these namespaces may have no controllers.
    (system / "etc/containers/containers.conf").write_text("[containers]\npids_limit = 0\n")
    (system / "etc/containers/systemd").mkdir(exist_ok=True)


class Booted:
    """A system that systemd has booted."""

    def __init__(self, process, pid):
        self.process, self.pid = process, pid

    def __call__(self, *command):
        """The output of a command in it."""
        inside = ["nsenter", "--target", self.pid, "--all", "env", "-i", "PATH=/usr/sbin:/usr/bin"]
        return run(*inside, *command).decode().strip()

    def worker(self):
        """The process that serves the layers, if there is one."""
        with contextlib.suppress(CommandFailed):
            return json.loads(self("lazuli", "status", "--json"))["daemon"]["worker_pid"]

    def answers(self):
        """Whether the container's redis does."""
        script = "exec 3<>/dev/tcp/127.0.0.1/6379; echo PING >&3; read -r line <&3; echo $line"
        with contextlib.suppress(CommandFailed):
            return self("bash", "-c", script) == "+PONG"

    def has_booted(self):
        """Whether systemd has started everything; it has a status of its own until then."""
        return self("sh", "-c", "systemctl is-system-running || true") in ("running", "degraded")

    def power_off(self):
        """Returns when it is off; what asks for it may not live to see that."""
        with contextlib.suppress(CommandFailed):
            self("systemctl", "poweroff", "--force")
        self.process.wait(TIMEOUT)


@contextlib.contextmanager
def booted(system, log):
    """Boot it in a group of its own, whose name begins with that of the namespaces, and join its
    network."""
    hierarchies = Path("/sys/fs/cgroup")
    unified = hierarchies / "unified" if (hierarchies / "unified").exists() else hierarchies
    group = unified / system.parent.name
    group.mkdir(exist_ok=True)
    boot = f"echo $$ > {group}/cgroup.procs; exec {REPOSITORY}/tests/package/boot {system}"
    with open(log, "ab") as output:
        process = subprocess.Popen(["sh", "-c", boot], stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=output, start_new_session=True)
    try:
        wait_until(lambda: systemd(process), TIMEOUT, "systemd")
        node = Booted(process, systemd(process))
        with open(f"/proc/{node.pid}/ns/net") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        wait_until(node.has_booted, TIMEOUT, "the boot")
        yield node
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def systemd(process):
    """The first process of what `process` boots, once it is systemd."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/comm").read_text() == "systemd\n":
                return pid


def main(system, layout, form, work):
    """A lazy image: started, its worker killed, started again, and started by a boot without the
    registry."""
    work.mkdir()
    with booted(system, work / "boot.log") as node:
        with registry(work / "registry") as server:
            image = f"{server.address}/redis:1"
            Lazuli(work / "copy")("copy", f"oci:{layout}:latest", image)
            etc, insecure = system / "etc/containers", REGISTRIES.format(registry=server.address)
            (etc / "registries.conf.d/test.conf").write_text(insecure)
            (etc / "systemd/redis.container").write_text(QUADLET.format(image=image))
            node("systemctl", "daemon-reload")
            with server.counted() as traffic:
                node("systemctl", "start", "redis")
                wait_until(node.answers, TIMEOUT, "redis to answer")
            size = image_size(image)
            expect(traffic.bytes < 0.7 * size, f"{traffic.bytes} of {size} bytes for a start")
            fetched = f"{mb(traffic.bytes)} of {mb(size)} MB fetched"
            saw("systemctl start of a quadlet's service", form, fetched)
            worker = node.worker()
            node("sh", "-c", f"kill -KILL {worker}")
            wait_until(lambda: node.worker() not in (None, worker), TIMEOUT, "another worker")
            with server.counted() as traffic:
                node("podman", "exec", "systemd-redis", "sha256sum", UNREAD)
            expect(traffic.bytes > 0, f"{UNREAD} is fetched")
            node("systemctl", "restart", "redis")
            wait_until(node.answers, TIMEOUT, "redis to answer")
            saw("its restart after kill -9 of the worker", form, "answers")
        node.power_off()
    with booted(system, work / "boot.log") as node:
        wait_until(node.answers, TIMEOUT, "redis to answer")
        saw("a boot without the registry", form, "it answers")
        node.power_off()
