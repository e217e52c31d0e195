"""Starts a container on an empty node, lazily or after a pull."""

import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass

from . import CommandFailed, drop_caches, end, run
from .lazuli import lazuli
from .oci import layers_size

PULL = "pull, unpack, run"
DRIVERS = ("fanotify", "fuse")
TIMEOUT = 600


@dataclass
class Start:
    """One cold start: seconds from the first command to the first byte of output and to the exit,
    and what the registry sent meanwhile."""

    system: str
    first_output: float
    total: float
    requests: int
    bytes: int

    def share(self, size):
        """The part of a full pull that was fetched, in percent."""
        return 100 * self.bytes / size


def start(system, server, references, argv, expect, work):
    """Start `argv` of an image cold with one system: PULL or a driver of lazuli's. `references` are
    (as it was built, as lazuli converted it); `expect` is what it must print."""
    work.mkdir()
    if system == PULL:
        measured = pull_then_run(server, references[0], argv, expect, work)
    else:
        measured = lazy_run(server, references[1], argv, expect, work, system)
    shutil.rmtree(work)
    return measured


def pull_then_run(server, reference, argv, expect, work):
    """skopeo fetches, umoci unpacks, runc runs."""
    drop_caches()
    with server.counted() as traffic:
        first, total = pulled(reference, argv, expect, work)
    return Start(PULL, first, total, traffic.requests, traffic.bytes)


def pulled(reference, argv, expect, work, inside=lambda *command: command):
    """The same without counting; `inside` says how a command is run on the node that pulls."""
    bundle, layout = work / "bundle", f"{work / 'layout'}:latest"
    began = time.monotonic()
    run(*inside("skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", f"docker://{reference}", f"oci:{layout}"))
    run(*inside("umoci", "unpack", "--image", layout, bundle))
    config = json.loads((bundle / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": list(argv)}
    (bundle / "config.json").write_text(json.dumps(config))
    runc, name = ["runc", "--root", work / "runc"], f"lazuli-lab-{os.getpid()}-{work.name}"
    try:
        return watch(inside(*runc, "run", "--bundle", bundle, name), expect, began)
    finally:
        subprocess.run([*runc, "delete", "--force", name], capture_output=True)


def lazy_run(server, reference, argv, expect, work, driver):
    """lazuli runs, with a state directory that is new: its daemon is started too."""
    with lazuli(work / "root") as instance:
        drop_caches()
        with server.counted() as traffic:
            began = time.monotonic()
            command = instance.command("run", "--driver", driver, reference, "--", *argv)
            first, total = watch(command, expect, began)
    return Start(driver, first, total, traffic.requests, traffic.bytes)


def watch(command, expect, began):
    """Run a command; return the seconds since `began` until its first output, and until its end."""
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        select.select([process.stdout], [], [], TIMEOUT)
        first = time.monotonic() - began
        output, errors = process.communicate(timeout=max(1, TIMEOUT - first))
    finally:
        end(process)
    total = time.monotonic() - began
    if process.returncode or expect not in output:
        raise CommandFailed(command, process.returncode, output + errors)
    return first, total


def image_size(reference):
    """The bytes of all layers of an image in a registry, of an index's first one."""
    raw = run("skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{reference}")
    manifest = json.loads(raw)
    if "manifests" in manifest:
        repository = reference.rpartition(":")[0]
        return image_size(f"{repository}@{manifest['manifests'][0]['digest']}")
    return layers_size(manifest)
