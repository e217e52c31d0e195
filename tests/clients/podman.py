"""Debian's podman, which finds layers in Lazuli's layer store."""

import contextlib
import json
import os
import resource
import subprocess
import time

import through_mirror
from lab import corpus, drop_caches, median, run
from lab.coldstart import image_size
from lab.lazuli import Lazuli
from lab.link import link
from scene import FORMS, ON_DEMAND, expect, expect_failure, lazuli, mb, same_trees, saw

IMAGE = "redis"
PROGRAM = ["redis-server", "--version"]
# A file that a start of the image does not read.
UNREAD = "/usr/bin/perl"

# What is measured: an image of 360 MB, at a distance.
BIG = "python"
BIG_PROGRAM = ["python3", "-c", "import json, sys; print(json.dumps(sys.version))"]
ROUND_TRIP_MS, MEGABITS, ROUNDS = 20, 1000, 3

LAYERS = """\
[layers]
directory = "{work}/layers"
"""

STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{work}/{name}"
runroot = "{work}/{name}-run"
[storage.options]
{layers}
"""

REGISTRIES = """\
[[registry]]
location = "{registry}"
insecure = true
"""

# A registry that only the node's daemon finds.
REGISTRY = "registry.example"
MIRRORED = f"""\
[[registry]]
location = "{REGISTRY}"
[[registry.mirror]]
location = "{through_mirror.LISTEN}/{REGISTRY}"
"""


def prepare(_work):
    """Make what needs a network."""
    corpus(IMAGE, BIG)


def main(work):
    for form in FORMS:
        with scene(work / form) as node:
            everything(node, form)
    for form in ("ordinary", "indexed"):
        with scene(work / f"build-{form}") as node:
            image = node.publish(IMAGE, [form])[form]
            build(node, form, image, form == "indexed")
    with scene(work / "mirror", ON_DEMAND + through_mirror.SETTINGS) as node:
        from_mirror(node)
    measure(work)


@contextlib.contextmanager
def scene(work, settings=ON_DEMAND, images=None):
    """A node with a layer store."""
    with lazuli(work, LAYERS.format(work=work) + settings, images) as node:
        yield node


class Podman:
    """`podman` with a storage of its own, which finds layers in the node's layer store or not."""

    def __init__(self, node, name="podman", lazy=True, registry=None):
        self.node, self.storage, work = node, node.work / name, node.work
        layers = f'additionallayerstores = ["{work}/layers:ref"]' if lazy else ""
        storage = STORAGE.format(work=work, name=name, layers=layers)
        registries = MIRRORED + REGISTRIES.format(registry=registry or node.registry.address)
        files = {"storage": storage, "registries": registries}
        for kind, content in files.items():
            (work / f"{name}-{kind}.conf").write_text(content)
        self.environment = os.environ | {
            f"CONTAINERS_{kind.upper()}_CONF": f"{work}/{name}-{kind}.conf" for kind in files
        }

    def command(self, *verb):
        return ["podman", "--cgroup-manager", "cgroupfs", "--runtime", "runc", *map(str, verb)]

    def __call__(self, *verb):
        return run(*self.command(*verb), env=self.environment).decode()

    def run(self, reference, *command):
        """The output of a container that has no network."""
        return self("run", "--rm", *self.options, reference, *command)

    def prints(self, reference, *command):
        """When a container prints its first line. podman 4.3 may take 20 seconds longer to end, if
        it misses the end of conmon."""
        verb = self.command("run", "--rm", *self.options, reference, *command)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        with subprocess.Popen(verb, env=self.environment, **pipes) as process:
            line, at = process.stdout.readline(), time.monotonic()
        expect(line and process.returncode == 0, "a container that prints a line")
        return at

    @property
    def options(self):
        return ["--network", "none", "--cgroup-parent", f"/{self.node.work.parent.name}"]

    def lazy_layers(self):
        """How many layers of the storage are those of the layer store, and how many there are."""
        overlay = self.storage / "overlay"
        layers = json.loads((self.storage / "overlay-layers/layers.json").read_text())
        lazy = [it for it in layers if (overlay / it["id"] / "additionallayer").exists()]
        return len(lazy), len(layers)

    def tree(self, reference):
        """Every entry of an image that was pulled, as a list."""
        directory = self("image", "mount", reference).strip()
        try:
            lines = run(Lazuli.BINARY.parent / "treelist", directory).decode(errors="replace")
        finally:
            self("image", "unmount", reference)
        return lines.splitlines()


def everything(node, form):
    podman, images = Podman(node), node.publish(IMAGE, {"ordinary", form})
    image, size = images[form], image_size(images[form])
    if form == "lazy":
        expect_failure(lambda: podman("pull", "--quiet", image), "magic number mismatch")
        saw("podman pull", form, "refused: podman does not know layers of data")
        return
    with node.registry.counted() as traffic:
        podman("pull", "--quiet", image)
        expect("v=" in podman.run(image, *PROGRAM), "redis-server says its version")
    lazy = form == "indexed"
    expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a start")
    from_store, layers = podman.lazy_layers()
    expect(from_store == (layers if lazy else 0), f"{from_store} of {layers} layers are lazy")
    saw("podman pull, run", form, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")

    name = f"box-{form}"
    podman("run", "--detach", "--name", name, *podman.options, "--user", "root", image,
           "sleep", "10000")
    podman("exec", name, "sh", "-c", "echo written > /new && rm /etc/debian_version")
    node.kill_worker()
    with node.registry.counted() as traffic:
        unread = podman("exec", name, "sha256sum", UNREAD)
    expect((traffic.bytes > 0) == lazy, f"{traffic.bytes} bytes fetched for {UNREAD}")
    saw("podman exec after kill -9 of the worker", form, f"{mb(traffic.bytes)} MB fetched")
    expect("v=" in podman.run(image, *PROGRAM), "a container starts with the new worker")

    committed = image.replace(":1", ":committed")
    with node.registry.counted() as traffic:
        podman("commit", "--quiet", name, committed)
    saw("podman commit", form, f"{mb(traffic.bytes)} MB fetched")
    with node.registry.counted() as traffic:
        podman("push", "--quiet", committed)
    saw("podman push of the commit", form, f"{mb(traffic.bytes)} MB fetched")
    podman("rm", "--force", "--time", 0, name)
    podman("rmi", "--force", committed)
    check = ["sh", "-c", "cat /new; ls /etc/debian_version || sha256sum " + UNREAD]
    shown = podman.run(committed, *check)
    expect(shown == f"written\n{unread}", f"the pushed image shows {shown}")

    own = Podman(node, "own", lazy=False)
    own("pull", "--quiet", images["ordinary"])
    expected = own.tree(images["ordinary"])
    count = same_trees(expected, podman.tree(image))
    saw("tree beside podman's own", form, f"{count} entries are equal")

    with node.registry.counted() as traffic:
        podman("save", "--quiet", "--output", node.work / "saved.tar", image)
    own("load", "--quiet", "--input", node.work / "saved.tar")
    saw("podman save", form, f"{mb(traffic.bytes)} MB fetched")

    podman("rmi", "--all", "--force")
    mounts = node.status()["mounts"]
    expect(not mounts, f"nothing is mounted: {mounts}")


def from_mirror(node):
    """A pull of which the mirror is the first host."""
    image = node.publish(IMAGE, ["ordinary"])["ordinary"]
    through_mirror.set_up(node, REGISTRY, "containers")
    podman, name = Podman(node), image.replace(node.registry.address, REGISTRY)
    through_mirror.pulled(node, "podman", lambda: podman("pull", "--quiet", name), image)
    expect("v=" in podman.run(name, *PROGRAM), "redis-server says its version")


def build(node, form, image, lazy):
    """An image of a step on top of another one, in a form that is printed."""
    podman, directory, size = Podman(node), node.work / "context", image_size(image)
    directory.mkdir()
    step = f"{' '.join(PROGRAM)} && echo built > /it"
    (directory / "Containerfile").write_text(f"FROM {image}\nUSER root\nRUN {step}\n")
    # Without runc, which cannot make the groups that podman asks for here, and with the limits that
    # there are, since podman 5 would raise them and may not.
    options = ["--isolation", "chroot"]
    for name, kind in (("nproc", resource.RLIMIT_NPROC), ("nofile", resource.RLIMIT_NOFILE)):
        most = resource.getrlimit(kind)[1]
        options += ["--ulimit", f"{name}={most}:{most}"]
    with node.registry.counted() as traffic:
        podman("build", "--quiet", *options, "--tag", "built", directory)
    saw("podman build", form, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")
    expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a step")
    expect(podman.run("localhost/built", "cat", "/it") == "built\n", "what was built")


def measure(work):
    """Seconds and bytes until a first container has printed a line, on nodes that have nothing."""
    with scene(work / "images") as images:
        references = images.publish(BIG, ["ordinary", "indexed"])
        with link(images.registry.address, ROUND_TRIP_MS, MEGABITS) as far:
            starts = {form: [] for form in references}
            for turn in range(ROUNDS):
                for form in references:
                    image = references[form].replace(images.registry.address, far)
                    with scene(work / f"{form}-{turn}", "", images) as node:
                        starts[form].append(first_start(node, form, far, image))
    print(f"until a first container of {BIG} prints, {ROUND_TRIP_MS} ms, {MEGABITS} Mbit/s:")
    medians = {}
    for form, mine in starts.items():
        seconds, fetched = (median(values) for values in zip(*mine))
        medians[form] = seconds
        name = "podman's own pull" if form == "ordinary" else form
        saw("podman pull, run", name, f"{seconds:.2f} s, {mb(fetched)} MB")
    ratio = medians["indexed"] / medians["ordinary"]
    print(f"that is {ratio:.2f} of podman's own pull and run")
    expect(ratio < 0.5, "the indexed image is lazy")


def first_start(node, form, far, image):
    """Seconds that a start takes, and bytes from the registry meanwhile."""
    podman = Podman(node, lazy=form == "indexed", registry=far)
    drop_caches()
    with node.registry.counted() as traffic:
        began = time.monotonic()
        podman("pull", "--quiet", image)
        seconds = podman.prints(image, *BIG_PROGRAM) - began
    return seconds, traffic.bytes
