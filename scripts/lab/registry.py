"""A registry of our own on loopback, and what its access log says was fetched from it."""

import contextlib
import re
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from . import background, run

CONFIG = """\
version: 0.1
log:
  level: error
  accesslog: {{ disabled: false }}
storage:
  filesystem: {{ rootdirectory: {store} }}
http:
  addr: {address}
"""

# Apache's combined log: … "GET /v2/app/blobs/sha256:… HTTP/1.1" 206 1048576 "" "agent"
ACCESS = re.compile(rb'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3}) (?P<bytes>\d+) ')


@dataclass
class Traffic:
    """Requests that were answered, and the bytes of their answers' bodies."""

    requests: int = 0
    bytes: int = 0


class Registry:
    """docker-registry, storing below a directory. Counts are the registry's own, so they are the same
    measure for every client."""

    def __init__(self, directory, address):
        self.address, self.log = address, directory / "access.log"

    def reference(self, name):
        """The reference of a tag (NAME:TAG) in this registry."""
        return f"{self.address}/{name}"

    def push(self, source, name):
        """Push what skopeo calls `source`; return its reference here."""
        run("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", source,
            f"docker://{self.reference(name)}")
        return self.reference(name)

    @contextlib.contextmanager
    def counted(self):
        """Count what is fetched during the block; the counts are there after it."""
        traffic, start = Traffic(), self.settled()
        yield traffic
        vars(traffic).update(vars(self.traffic(start, self.settled())))

    def traffic(self, start, end):
        """What was fetched, by the part of the log between two of its sizes."""
        traffic = Traffic()
        with open(self.log, "rb") as log:
            log.seek(start)
            for request in ACCESS.finditer(log.read(end - start)):
                traffic.requests += 1
                traffic.bytes += int(request["bytes"]) if request["method"] == b"GET" else 0
        return traffic

    def settled(self):
        """The size of the log once it has stopped growing: lines are written after the answers."""
        size, seen = self.log.stat().st_size, -1
        while size != seen:
            time.sleep(0.05)
            seen, size = size, self.log.stat().st_size
        return size


@contextlib.contextmanager
def registry(directory):
    """A running registry that keeps all it has below `directory`."""
    directory.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = directory / "config.yml"
    config.write_text(CONFIG.format(store=directory / "store", address=address))
    server = Registry(directory, address)
    with background("docker-registry", "serve", config, log=server.log, ready=lambda: answers(address)):
        yield server


def answers(address):
    """Whether a registry speaks at an address."""
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False
