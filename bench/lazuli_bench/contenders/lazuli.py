"""Lazuli, with each driver, and with traced images."""

import contextlib

from lab import background, run
from lab.containerd import listens
from lab.lazuli import Lazuli, lazuli

from . import Contender, Service


class Fanotify(Contender):
    """As it comes, on machines whose kernel can; what is fetched ahead is guessed."""

    name, title, driver = "lazuli", "Lazuli", "fanotify"
    convert = []

    def version(self):
        return run(Lazuli.BINARY, "--version").decode().strip()

    def publish(self, layout, reference, work):
        with lazuli(work / "root") as instance:
            instance("convert", f"oci:{layout}", reference, *self.convert)

    @contextlib.contextmanager
    def service(self, work):
        socket, instance, config = work / "lazuli.sock", Lazuli(work / "root"), work / "config.toml"
        config.write_text(f'[snapshotter]\naddress = "{socket}"\ndriver = "{self.driver}"\n')
        instance.root.mkdir()
        command = [instance.BINARY, "--root", instance.root, "--config", config, "daemon"]
        with background(*command, log=work / "lazuli.log", ready=lambda: listens(socket)):
            try:
                yield Service("lazuli", socket, instance.processes)
            finally:
                instance.stop()


class Fuse(Fanotify):
    """On machines whose kernel has no pre-content events."""

    name, title, form, driver = "lazuli-fuse", "Lazuli, FUSE", Fanotify.name, "fuse"


class Traced(Fanotify):
    """The image was run once while it was made."""

    name, title = "lazuli-traced", "Lazuli, traced image"
    convert = ["--trace-run"]
