"""Dragonfly as in dist/dragonfly: scheduler, seed peers and nodes, in network namespaces."""

import contextlib
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from . import REPOSITORY, CommandFailed, background
from .network import HUB

CONFIG = REPOSITORY / "dist/dragonfly"
TRAFFIC = re.compile(r'^dragonfly_client_(download|upload)_traffic\{(?:.*type="(?P<type>\w+)".*)?\} (?P<bytes>\S+)$', re.M)


def binaries():
    """The directory of `scheduler` and `dfdaemon`."""
    command = [REPOSITORY / "scripts/dragonfly"]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def configured(name, directory, **changes):
    """A file of dist/dragonfly for a daemon that keeps all it has below `directory`; in it lines
    `KEY: …` are changed."""
    text = (CONFIG / name).read_text()
    text = re.sub(r"/(?:var/lib|var/log|run)/dragonfly", str(directory), text)
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^(\s*){key}: .*$", rf"\g<1>{key}: {value}", text)
        assert found, f"{name} has no {key}"
    path = directory / name
    path.write_text(text)
    return path


class Program:
    """A part of Dragonfly, which can be killed and started again."""

    def __init__(self, stack, directory, command, ready):
        self.stack, self.directory, self.command, self.ready = stack, directory, command, ready
        self.restart()

    def restart(self):
        """Start it, and wait until it listens. Ports may be taken for some seconds after its
        predecessor's end."""
        log = self.directory / "output.log"
        for left in reversed(range(5)):
            try:
                self.process = self.stack.enter_context(background(*self.command, log=log, ready=self.ready, timeout=60))
                break
            except CommandFailed:
                if not left:
                    raise
                time.sleep(2)
        # It may ignore SIGTERM for minutes.
        self.stack.callback(self.kill)

    def kill(self):
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()


class Daemon(Program):
    """A dfdaemon."""

    address = None

    def traffic(self):
        """Bytes so far by where they came from: BACK_TO_SOURCE, REMOTE_PEER, LOCAL_PEER; and
        UPLOAD."""
        with urllib.request.urlopen(f"http://{self.address}:4002/metrics", timeout=5) as metrics:
            text = metrics.read().decode()
        found = {}
        for line in TRAFFIC.finditer(text):
            kind = line["type"] if line[1] == "download" else "UPLOAD"
            found[kind] = found.get(kind, 0) + int(float(line["bytes"]))
        return found


@contextlib.contextmanager
def scheduler(directory, **changes):
    """A scheduler at the bridge; `changes` are of its configuration."""
    directory.mkdir()
    config = configured("scheduler.yaml", directory, **changes)
    config.write_text(config.read_text().replace("server:\n", f"server:\n  advertiseIP: {HUB}\n  listenIP: {HUB}\n", 1))
    command = [binaries() / "scheduler", "--config", config, "--dynconfig", configured("scheduler-dynconfig.yaml", directory)]
    with contextlib.ExitStack() as stack:
        yield Program(stack, directory, command, lambda: listens(HUB, 8002))


@contextlib.contextmanager
def daemon(directory, namespace, name, seed=False, **changes):
    """A dfdaemon in a namespace."""
    directory.mkdir(exist_ok=True)
    changes = ({"enable": "true"} if seed else {}) | changes
    config = configured("dfdaemon.yaml", directory, **changes)
    with open(config, "a") as more:
        more.write(f"host:\n  hostname: {name}\n  ip: {namespace.address}\n"
                   f"metrics:\n  server:\n    ip: {namespace.address}\n    port: 4002\n")
    dynamic = configured("dfdaemon-dynconfig.yaml", directory, addrs=f'["{HUB}:8002"]')
    command = [binaries() / "dfdaemon", "--config", config, "--dynconfig", dynamic, "--log-dir", directory / "log", "--log-level", "warn"]
    # The proxy, which only this node can reach, comes last.
    probe = namespace.inside("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/4001 4<>/dev/tcp/127.0.0.1/4003")

    def ready():
        return listens(namespace.address, 4002) and not subprocess.run(probe, stderr=subprocess.DEVNULL).returncode

    with contextlib.ExitStack() as stack:
        one = Daemon(stack, directory, namespace.inside(*command), ready)
        one.address = namespace.address
        yield one


def listens(address, port):
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False
