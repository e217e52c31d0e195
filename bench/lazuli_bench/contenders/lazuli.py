"""Lazuli, with each driver, and with traced images."""

import contextlib
import functools
import socket
import tempfile
from pathlib import Path

from lab import CommandFailed, background, run
from lab.containerd import listens
from lab.cosign import Cosign
from lab.lazuli import Lazuli, lazuli

from . import Contender, Service
from .overlayfs import Overlayfs


@contextlib.contextmanager
def daemon(work, driver, config="", mirror=False, tables=""):
    """The `Service` of a daemon whose files are all in the directory `work`. `config` has keys that
    are in no table, `tables` has others."""
    address, instance, file = work / "lazuli.sock", Lazuli(work / "root"), work / "config.toml"
    hosts = work / "certs.d"
    tables += f'[snapshotter]\naddress = "{address}"\ndriver = "{driver}"\n'
    if mirror:
        config += f'hosts_dir = "{hosts}"\n'
        tables += f'[mirror]\nlisten = "127.0.0.1:{free_port()}"\n'
    file.write_text(config + tables)
    instance.root.mkdir()
    command = [instance.BINARY, "--root", instance.root, "--config", file]
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


class FirstPull(Fanotify):
    """An ordinary image that nobody indexed: the node pulls its layers itself."""

    name, title, form = "lazuli-first", "Lazuli, first pull", Overlayfs.name
    is_variant = True

    @contextlib.contextmanager
    def service(self, work):
        # The disk of the machine may have less than a fifth left.
        with daemon(work, self.driver, tables='[cache]\nkeep_free = "2%"\n') as service:
            yield service
            left = [line for line in work.joinpath("lazuli.log").read_text().splitlines() if "left to containerd" in line]
            if left:
                raise CommandFailed(["first pull"], 1, left[0].encode())


class Indexed(Fanotify):
    """An ordinary image with a signed index beside it, which the node's policy trusts."""

    name, title = "lazuli-index", "Lazuli, indexed image"
    is_variant = True
    mirror = False

    def __init__(self):
        self.repository = None

    @functools.cached_property
    def key(self):
        return run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")

    def publish(self, layout, reference, work):
        Overlayfs().publish(layout, reference, work)
        work.joinpath("key").write_bytes(self.key)
        with lazuli(work / "root") as instance:
            instance("index", reference, "--sign", work / "key")
        self.repository = reference.rpartition(":")[0]

    def service(self, work):
        private, public = work / "key", work / "key.pub"
        private.write_bytes(self.key)
        public.write_bytes(run("openssl", "pkey", "-in", private, "-pubout"))
        policy = work / "policy.toml"
        policy.write_text(f'[default]\naccept = true\nstatements = ["{public}"]\nsigned_as = ["{self.repository}"]\n')
        return daemon(work, self.driver, f'policy = "{policy}"\n', self.mirror)


class MirroredIndexed(Indexed):
    """The same, pulled through the node's mirror."""

    name, title = "lazuli-index-mirror", "Lazuli, indexed image, mirror"
    mirror = True


class Signed(Fanotify):
    """cosign 3 signed the image, and the node's policy asks for that."""

    name, title = "lazuli-signed", "Lazuli, image signed by cosign 3"
    is_variant = True

    @functools.cached_property
    def cosign(self):
        return Cosign(Path(self.keys.name))

    @functools.cached_property
    def keys(self):
        return tempfile.TemporaryDirectory()

    def publish(self, layout, reference, work):
        super().publish(layout, reference, work)
        self.cosign.sign(reference)

    def service(self, work):
        policy = work / "policy.toml"
        policy.write_text(f'[default]\nkeys = ["{self.cosign.public}"]\n')
        return daemon(work, self.driver, f'policy = "{policy}"\n')


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
