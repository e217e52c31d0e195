"""containerd's EROFS snapshotter, which downloads layers whole and mounts them."""

import contextlib
import re
import shutil
from pathlib import Path

from lab import run
from lab.containerd import containerd_program, containerd_version

from .overlayfs import Overlayfs
from . import Service

# It is in containerd since 2.1.
SINCE = (2, 1)


class Erofs(Overlayfs):
    name, title, form = "erofs", "OCI, EROFS", Overlayfs.name

    def missing(self):
        if not shutil.which(containerd_program()):
            return "no containerd"
        version = containerd_version()
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < SINCE:
            return f"containerd {version} has no EROFS snapshotter, 2.1 has: CONTAINERD names another one"
        if not shutil.which("mkfs.erofs"):
            return "no mkfs.erofs"
        if "\terofs" not in Path("/proc/filesystems").read_text():
            return "the kernel has no EROFS"
        return None

    @contextlib.contextmanager
    def service(self, work):
        yield Service("erofs")
