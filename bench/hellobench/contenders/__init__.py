"""The ways to bring an image to a node that are compared. A new one is a module here, and a line in `ALL`."""

import os
import shutil
from pathlib import Path

from lab.containerd import Service as Service

REPOSITORY = Path(__file__).resolve().parents[3]

# Other ways that readers may look for, and why nobody measures them here.
ABSENT = {
    "SOCI": "its Go module, github.com/awslabs/soci-snapshotter, is not to be had from the Go module proxy that was used",
    "Nydus v3": "no release was found to build: nydus-snapshotter v0.16.1, its newest Go module, runs the nydusd of v2",
}


class Contender:
    """One way. `name` is a word for results, `title` what people read."""

    name = title = ""

    @property
    def form(self):
        """The name of the contender whose images it takes: its own, or that of one before it."""
        return self.name

    def missing(self):
        """Why it cannot be measured here, or nothing."""
        return None

    def version(self):
        """What its programs say of themselves."""
        raise NotImplementedError

    def publish(self, layout, reference, work):
        """Push the image of an OCI layout (`DIR:latest` for skopeo) to a registry without TLS, as this contender
        wants it. The time that it takes is the contender's push. `work` is an empty directory."""
        raise NotImplementedError

    def service(self, work):
        """A context with the `Service` of a node that has nothing yet. All of its files are below `work`."""
        raise NotImplementedError

    def containerd_config(self, service):
        """What containerd's configuration needs besides the snapshotter, as TOML."""
        return ""


def program(name, variable=None):
    """A program's path: what a variable of the environment names, or what is in PATH or where scripts/contenders builds."""
    named = os.environ.get(variable) if variable else None
    built = os.environ.get("LAZULI_CONTENDERS", REPOSITORY / "target/contenders")
    return named or shutil.which(name, path=f"{os.environ['PATH']}:{built}")


def contenders():
    """All of them, in the order of tables."""
    from . import erofs, lazuli, nydus, overlayfs, stargz
    return [overlayfs.Overlayfs(), lazuli.Fanotify(), lazuli.Fuse(), lazuli.Traced(), stargz.Stargz(), nydus.Nydus(),
            erofs.Erofs()]
