"""A private registry on loopback, and the traffic that its access log shows."""

import contextlib
import ctypes
import os
import re
import socket
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

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

CLONE_NEWNS = 0x20000

# Apache's combined log: … "GET /v2/app/blobs/sha256:… HTTP/1.1" 206 1048576 "" "agent"
ACCESS = re.compile(rb'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3}) (?P<bytes>\d+) ')


# Blobs come from object storage in front of the registry, as with the big ones; it answers
# everything else. Only GET: whether a repository has a blob is for the registry to say.
STORAGE = """\
daemon off;
user root;
pid {directory}/nginx.pid;
error_log {directory}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log {directory}/access.log combined;
  client_body_temp_path {directory}/nginx-body;
  proxy_temp_path {directory}/nginx-proxy;
  fastcgi_temp_path {directory}/nginx-fastcgi;
  uwsgi_temp_path {directory}/nginx-uwsgi;
  scgi_temp_path {directory}/nginx-scgi;
  client_max_body_size 0;
  server {{
    listen {address} {protocol} backlog=4096;
    listen {other} {protocol};
    {login}
    location / {{
      proxy_pass http://{registry};
      proxy_http_version 1.1;
      proxy_set_header Host $http_host;
      proxy_set_header X-Forwarded-Proto $scheme;
      proxy_request_buffering off;
      proxy_buffering off;
    }}
    location = /v2/ {{ return 200 "{{}}"; }}
    location ~ ^/v2/.+/blobs/sha256:(?<head>..)(?<tail>[0-9a-f]+)$ {{
      if ($request_method != GET) {{ proxy_pass http://{registry}; }}
      proxy_set_header Host $http_host;
      alias {store}/docker/registry/v2/blobs/sha256/$head/$head$tail/data;
    }}
  }}
}}
"""

# What public registries add: TLS, and a token service that gives everybody the same token.
LOGIN = """\
ssl_certificate {directory}/certificate.pem;
    ssl_certificate_key {directory}/key.pem;
    set $may 0;
    if ($http_authorization = "Bearer lab") {{ set $may 1; }}
    if ($uri = /token) {{ set $may 1; }}
    if ($may = 0) {{ return 401; }}
    error_page 401 @challenge;
    location @challenge {{
      add_header WWW-Authenticate 'Bearer realm="https://$http_host/token",service="lab"' always;
      return 401;
    }}
    location = /token {{
      default_type application/json;
      return 200 '{{"token": "lab", "expires_in": 3600}}';
    }}
"""


@dataclass
class Traffic:
    """Requests that were answered, and the bytes of their answers' bodies."""

    requests: int = 0
    bytes: int = 0


class Registry:
    """A registry that is running. Counts are its own, so they are the same measure for every
    client."""

    def __init__(self, directory, address, host="127.0.0.1", other=None):
        self.address, self.host, self.other, self.log = address, host, other, directory / "access.log"

    def named(self, address):
        """The name by which clients reach it at an address of loopback."""
        return f"{self.host}:{address.rpartition(':')[2]}"

    def reference(self, name):
        """The reference of a tag (NAME:TAG) in this registry."""
        return f"{self.named(self.address)}/{name}"

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
    address = free_address()
    with serving(directory, directory / "store", address, directory / "access.log"):
        yield Registry(directory, address)


@contextlib.contextmanager
def remote_registry(directory, secure=False):
    """The same as if it were elsewhere: what it stores is in memory, because its disks and caches
    would be its own, and blobs are served by nginx. docker-registry takes 5 ms of a processor for
    each, which the node that is measured would lack. A secure one has TLS, and asks for a token;
    programs that are started meanwhile trust its certificate. At its `other` address it is another
    registry for clients, which share neither connections nor logins with the first."""
    directory.mkdir(parents=True)
    address, other, registry = free_address(), free_address(), free_address()
    config = directory / "nginx.conf"
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="lazuli-registry-", dir="/dev/shm"))
        host, protocol, login = "127.0.0.1", "", ""
        if secure:
            host = stack.enter_context(trusted_host(directory))
            protocol, login = "ssl", LOGIN.format(directory=directory)
        config.write_text(STORAGE.format(directory=directory, store=store, address=address, other=other,
                                         registry=registry, protocol=protocol, login=login))
        nginx = ["nginx", "-c", config, "-e", directory / "nginx.log"]
        stack.enter_context(serving(directory, store, registry, directory / "registry.log"))
        stack.enter_context(background(*nginx, log=directory / "nginx.log", ready=lambda: answers(address)))
        yield Registry(directory, address, host, other)


@contextlib.contextmanager
def trusted_host(directory):
    """A name of loopback with a certificate that programs trust which are started in the block.
    Clients use plain HTTP for names that say that they are loopback."""
    host, certificate, hosts = "registry.lab", directory / "certificate.pem", directory / "hosts"
    run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "7",
        "-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}", "-addext", "basicConstraints=critical,CA:FALSE",
        "-keyout", directory / "key.pem", "-out", certificate)
    hosts.write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {host}\n")
    # A mount namespace, so that the machine's /etc/hosts stays what it is.
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    run("mount", "--make-rslave", "/")
    run("mount", "--bind", hosts, "/etc/hosts")
    before = dict(os.environ)
    os.environ["SSL_CERT_FILE"] = str(certificate)
    try:
        yield host
    finally:
        os.environ.clear()
        os.environ.update(before)
        run("umount", "/etc/hosts")


def serving(directory, store, address, log):
    """docker-registry, as long as the block lasts."""
    config = directory / "config.yml"
    config.write_text(CONFIG.format(store=store, address=address))
    return background("docker-registry", "serve", config, log=log, ready=lambda: answers(address))


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def answers(address):
    """Whether a registry speaks at an address; one with TLS says that it has."""
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=1):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 400
    except (urllib.error.URLError, OSError):
        return False
