"""Lazuli, with each driver, and with traced images."""

import contextlib
import socket

from lab import background, run
from lab.containerd import listens
from lab.lazuli import Lazuli, lazuli

from . import Contender, Service
from .overlayfs import Overlayfs


@contextlib.contextmanager
def daemon(work, driver, mirror=False):
    """The `Service` of a daemon whose files are all in the directory `work`."""
    address, instance, config = work / "lazuli.sock", Lazuli(work / "root"), work / "config.toml"
    text, hosts = f'[snapshotter]\naddress = "{address}"\ndriver = "{driver}"\n', work / "certs.d"
    if mirror:
        text += f'[registry]\nhosts_dir = "{hosts}"\n[mirror]\nlisten = "127.0.0.1:{free_port()}"\n'
    config.write_text(text)
    instance.root.mkdir()
    command = [instance.BINARY, "--root", instance.root, "--config", config]
    with background(*command, "daemon", log=work / "lazuli.log", ready=lambda: listens(address)):
        try:
            if mirror:
                run(*command, "setup", "mirror", "--containerd", work / "none.toml")
            yield Service("lazuli", address, instance.processes, hosts if mirror else None)
        finally:
            instance.stop()


def free_port():
    """A port of loopback that nothing listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Fanotify(Contender):
    """As it comes, on machines whose kernel can; what is fetched ahead is guessed."""

    name, title, driver = "lazuli", "Lazuli", "fanotify"
    convert = []

    def version(self):
        return run(Lazuli.BINARY, "--version").decode().strip()

    def publish(self, layout, reference, work):
        with lazuli(work / "root") as instance:
            instance("convert", f"oci:{layout}", reference, *self.convert)

    def service(self, work):
        return daemon(work, self.driver)


class Fuse(Fanotify):
    """On machines whose kernel has no pre-content events."""

    name, title, form, driver = "lazuli-fuse", "Lazuli, FUSE", Fanotify.name, "fuse"


class Mirrored(Fanotify):
    """containerd pulls through the node's mirror."""

    name, title, form = "lazuli-mirror", "Lazuli, mirror", Fanotify.name
    is_variant = True

    def service(self, work):
        return daemon(work, self.driver, mirror=True)


class MirroredOverlayfs(Overlayfs):
    """An ordinary pull through the node's mirror."""

    name, title, form = "overlayfs-mirror", "OCI, overlayfs, mirror", Overlayfs.name
    is_variant = True

    @contextlib.contextmanager
    def service(self, work):
        with daemon(work, Fanotify.driver, mirror=True) as mirror:
            yield Service("overlayfs", processes=mirror.processes, hosts=mirror.hosts)


class Traced(Fanotify):
    """The image was run once while it was made."""

    name, title = "lazuli-traced", "Lazuli, traced image"
    convert = ["--trace-run"]
