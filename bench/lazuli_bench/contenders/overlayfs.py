"""containerd's default, which downloads and unpacks everything first."""

import contextlib

from lab import run
from lab.containerd import containerd_version

from . import Contender, Service


class Overlayfs(Contender):
    name, title = "overlayfs", "OCI, overlayfs"

    def version(self):
        return f"containerd {containerd_version()}"

    def publish(self, layout, reference, work):
        run("skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", f"oci:{layout}", f"docker://{reference}")

    @contextlib.contextmanager
    def service(self, work):
        yield Service("overlayfs")
