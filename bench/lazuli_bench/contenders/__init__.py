"""The contenders: a module and a name in `contenders` for each."""

import os
import shutil

from lab import REPOSITORY
from lab.containerd import Service as Service

# Other ways that readers may look for, and why they are not measured here.
ABSENT = {
    "SOCI": "its Go module, github.com/awslabs/soci-snapshotter, is not to be had from the Go module proxy that was used",
    "Nydus v3": "no release was found to build: nydus-snapshotter v0.16.1, its newest Go module, runs the nydusd of v2",
}


class Contender:
    """One way. `name` is a word for results, `title` what people read."""

    name = title = ""
    # Only measured where it is named.
    is_variant = False

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
        """Push the image of an OCI layout (`DIR:latest` for skopeo) to a registry without TLS, as
        this contender wants it. The time that it takes is the contender's push. `work` is an empty
        directory."""
        raise NotImplementedError

    def service(self, work):
        """A context with the `Service` of a node that has nothing yet. All of its files are below
        `work`."""
        raise NotImplementedError


def program(name):
    """A program's path: in PATH, or where scripts/contenders builds."""
    built = os.environ.get("LAZULI_CONTENDERS", REPOSITORY / "target/contenders")
    return shutil.which(name, path=f"{os.environ['PATH']}:{built}")


def contenders():
    """All of them, in the order of tables."""
    from . import erofs, lazuli, nydus, overlayfs, stargz
    return [overlayfs.Overlayfs(), lazuli.Fanotify(), lazuli.Fuse(), lazuli.Traced(), lazuli.FirstPull(),
            lazuli.Indexed(), lazuli.MirroredIndexed(), lazuli.Signed(), lazuli.Mirrored(), lazuli.MirroredOverlayfs(),
            stargz.Stargz(), nydus.Nydus(), erofs.Erofs()]
