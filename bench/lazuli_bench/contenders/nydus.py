"""Nydus images (v2: RAFS v6) and the nydus snapshotter, whose nydusd serves them with FUSE."""

import contextlib
import os
import resource
import shutil
import signal
import time
import tomllib
from pathlib import Path

from lab import REPOSITORY, background, run, unmount_below
from lab.containerd import listens
from lab.nydus import configure

from . import Contender, Service, program
from .stargz import directory

SNAPSHOTTER, CONVERTER = "containerd-nydus-grpc", "contender-nydus-convert"

# nydusd wants a limit of a million open files, and ends where it may not raise it so far; its
# snapshotter cannot tell it another.
WRAPPER = """\
#!/bin/sh
exec '{nydusd}' "$@" --rlimit-nofile {files}
"""
FILES = 1_000_000


class Nydus(Contender):
    name, title = "nydus", "Nydus v2"

    def missing(self):
        for name in SNAPSHOTTER, CONVERTER:
            if not program(name):
                return f"no {name}: scripts/contenders builds it"
        for name in "nydusd", "nydus-image":
            if not upstream(name):
                return f"no {name}: LAZULI_NYDUS names no directory that has it"
        return None

    def version(self):
        return f"nydus-snapshotter {snapshotter_version()}, nydusd {nydusd_version()}"

    def publish(self, layout, reference, work):
        converted = work / "layout"
        run(program(CONVERTER), "--builder", upstream("nydus-image"), directory(layout), converted)
        run("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", f"oci:{converted}:latest", f"docker://{reference}")

    @contextlib.contextmanager
    def service(self, work):
        socket = work / "nydus.sock"
        # With the clean-up its processes end with it.
        config = configure(work, upstream("nydus-image"))
        wrap(upstream("nydusd"), work / "nydusd")
        family = []
        try:
            with background(program(SNAPSHOTTER), "--config", config, log=work / "nydus.log",
                            ready=lambda: listens(socket)) as process:
                try:
                    yield Service("nydus", socket, lambda: descendants(process.pid))
                finally:
                    family = descendants(process.pid)[1:]
        finally:
            unmount_below(work)
            for child in family:
                end_child(child)


def upstream(name):
    """One of upstream's programs: in the directory of LAZULI_NYDUS, where the Makefile builds them,
    or in PATH."""
    places = [os.environ.get("LAZULI_NYDUS"), str(REPOSITORY / "target/nydus/bin"), os.environ["PATH"]]
    return shutil.which(name, path=":".join(filter(None, places)))


def snapshotter_version():
    """The version of the snapshotter's module, which Go notes in what it builds."""
    if not shutil.which("go"):
        return "unknown"
    lines = run("go", "version", "-m", program(SNAPSHOTTER)).decode().splitlines()
    modules = [line.split() for line in lines if "\tgithub.com/containerd/nydus-snapshotter\t" in line]
    return modules[0][2] if modules else "unknown"


def nydusd_version():
    """What nydusd says of itself, or what cargo has noted of it: one that cargo has built does not
    know its version."""
    lines = run(upstream("nydusd"), "--version").decode().splitlines()
    said = next((line.split()[-1] for line in lines if "Version:" in line), "unknown")
    notes = Path(upstream("nydusd")).parents[1] / ".crates.toml"
    if said != "unknown" or not notes.exists():
        return said
    crates = [name.split() for name in tomllib.loads(notes.read_text())["v1"]]
    return next((version for name, version, *_ in crates if name == "nydus-rs"), said)


def wrap(nydusd, path):
    """A program that is nydusd with a limit of open files that it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    path.write_text(WRAPPER.format(nydusd=nydusd, files=files))
    path.chmod(0o755)


def descendants(process):
    """A process and what it has started, by id."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Behind the name, which may have spaces and parentheses: state, parent.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = [process]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def end_child(process):
    """Have a process end that is no child of ours; it may have ended already."""
    for number in signal.SIGTERM, signal.SIGKILL:
        deadline = time.monotonic() + 5
        while is_nydusd(process) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.kill(process, number)
            time.sleep(0.05)


def is_nydusd(process):
    """Whether a process is (still) one of nydusd's that is alive."""
    try:
        name, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return False
    return name.endswith("(nydusd") and rest.split()[0] != "Z"
