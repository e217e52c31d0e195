"""BuildKit with a containerd worker, alone and below `nerdctl build`.

BuildKit passes on which image a layer belongs to for the snapshotters `stargz` and `overlaybd`
only, so the plugin is called stargz here. Layers of a media type that it does not know, such as the
data of converted images, it takes for metadata and downloads.
"""

import contextlib
import os
import subprocess
import time

from lab import REPOSITORY, background, corpus, drop_caches, median, run
from lab.coldstart import image_size
from lab.lazuli import Lazuli
from lab.link import link
from nerdctl import Nerdctl
from scene import FORMS, TIMEOUT, expect, expect_failure, mb, saw, scene

IMAGE = "redis"
STEP = "redis-server --version && echo built > /built"

# Has an exporter make lazy images.
NYDUS = "compression=nydus,force-compression=true,oci-mediatypes=true"

# What is measured: an image of 360 MB, at a distance.
BIG, BIG_STEP = "python", "python3 -c 'import json, sys; print(json.dumps(sys.version))'"
ROUND_TRIP_MS, MEGABITS, ROUNDS = 20, 1000, 3

CONFIG = """\
root = "{work}/buildkit-{snapshotter}"
[grpc]
  address = ["unix://{work}/buildkitd.sock"]
[worker.oci]
  enabled = false
[worker.containerd]
  enabled = true
  address = "{socket}"
  namespace = "{namespace}"
  snapshotter = "{snapshotter}"
  defaultCgroupParent = "{namespace}"
  networkMode = "host"
[registry."{registry}"]
  http = true
"""


def prepare(_work):
    """Make what needs a network."""
    corpus(IMAGE, BIG)
    programs()


def programs():
    """Make the programs, and have them found."""
    for name in ("containerd", "nerdctl", "buildkit"):
        built = subprocess.check_output([REPOSITORY / "scripts" / name], text=True)
        os.environ[f"LAZULI_{name.upper()}"] = built.strip()
    os.environ["PATH"] += f":{os.environ['LAZULI_BUILDKIT']}"


def main(work):
    for form in FORMS:
        with scene(work / form, "stargz") as node:
            everything(node, form)
    with scene(work / "export", "stargz") as node:
        export(node)
    measure(work)


@contextlib.contextmanager
def buildkit(node, snapshotter, registry, program="buildkitd", **environment):
    """A buildkitd in the namespace of `Nerdctl(node)`; yields a function that builds."""
    work, namespace = node.work, Nerdctl(node).namespace
    config, address = work / "buildkitd.toml", f"unix://{work}/buildkitd.sock"
    config.write_text(CONFIG.format(work=work, socket=node.socket, namespace=namespace,
                                    snapshotter=snapshotter, registry=registry))
    buildctl = ["buildctl", "--addr", address]

    def build(base, step, *options):
        directory = context(node, base, step)
        run(*buildctl, "build", "--frontend", "dockerfile.v0", "--local", f"context={directory}",
            "--local", f"dockerfile={directory}", *options)

    def ready():
        workers = subprocess.run([*buildctl, "debug", "workers"], capture_output=True)
        return workers.returncode == 0

    with background(program, "--config", config, log=work / "buildkitd.log", ready=ready,
                    timeout=TIMEOUT, env=os.environ | environment):
        yield build


@contextlib.contextmanager
def exporter(node, snapshotter):
    """The same with one that exports lazy images, with lazuli as its nydus-image."""
    builder = node.work / "nydus-image"
    builder.symlink_to(Lazuli.BINARY)
    tagged = {"NYDUS_BUILDER": str(builder), "NYDUS_WORKDIR": str(node.work / "nydus")}
    registry = node.registry.address
    with buildkit(node, snapshotter, registry, "buildkitd-nydus", **tagged) as build:
        yield build


def context(node, base, step):
    """The directory of a build that has one step."""
    directory = node.work / "context"
    directory.mkdir(exist_ok=True)
    (directory / "Dockerfile").write_text(f"FROM {base}\nUSER root\nRUN {step}\n")
    return directory


def everything(node, form):
    images = node.publish(IMAGE, {"ordinary", form})
    image, size, nerdctl = images[form], image_size(images[form]), Nerdctl(node)
    built = image.replace(":1", ":built")
    with buildkit(node, node.plugin, node.registry.address) as build:
        with node.registry.counted() as traffic:
            build(image, STEP)
        lazy = form == "indexed"
        expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a step")
        saw("FROM, RUN", form, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")

        node.kill_worker()
        with node.registry.counted() as traffic:
            build(image, STEP, "--output", f"type=image,name={built},push=true,store=false")
        expect(traffic.bytes < 1e6, f"{traffic.bytes} bytes fetched by a push")
        saw("push with store=false", form, f"{mb(traffic.bytes)} MB fetched")
        if form == "indexed":
            with node.registry.counted() as traffic:
                build(image, STEP, "--output", f"type=image,name={built},push=true")
            expect(traffic.bytes > 0.9 * size, f"{traffic.bytes} bytes fetched to store an image")
            saw("push with store=true", form, f"{mb(traffic.bytes)} MB fetched")
        if form == "lazy":
            # BuildKit leaves out the annotations of the layers of its base.
            expect_failure(lambda: nerdctl("pull", "--quiet", built), "no processor for media-type")
            saw("run of what was built", form, "refused: annotations are missing")
            return
        expect(nerdctl.run(built, "cat", "/built") == "built\n", "what was built")
        saw("run of what was built", form, "the step's file is there")
        nerdctl_build(node, nerdctl, image)
        saw("nerdctl build, run", form, "the step's file is there")


def nerdctl_build(node, nerdctl, image):
    """`nerdctl build` with a step of its own, and a container of it."""
    built = image.replace(":1", ":nerdctl")
    steps = f"FROM {image}\nUSER root\nRUN echo {built} > /it\n"
    (node.work / "context/Dockerfile").write_text(steps)
    nerdctl("build", "--buildkit-host", f"unix://{node.work}/buildkitd.sock", "--quiet",
            "--tag", built, node.work / "context")
    expect(nerdctl.run(built, "cat", "/it") == f"{built}\n", "what nerdctl built")


def export(node):
    """A lazy image from BuildKit, beside an ordinary one that is converted afterwards."""
    base = node.publish(IMAGE, {"ordinary"})["ordinary"]
    tags = ("nydus", "built", "lazy")
    exported, built, converted = (base.replace(":1", f":{tag}") for tag in tags)
    with exporter(node, "overlayfs") as build:
        build(base, STEP)
        # In this order: BuildKit takes layers as it has them, unless it is told what to make.
        began = time.monotonic()
        build(base, STEP, "--output", f"type=image,name={built},push=true")
        node.lazuli("convert", built, converted)
        saw("built, then converted", "lazy",
            f"{time.monotonic() - began:.1f} s, {mb(image_size(converted))} MB")
        began = time.monotonic()
        build(base, STEP, "--output", f"type=image,name={exported},push=true,{NYDUS}")
        saw("exported", "lazy", f"{time.monotonic() - began:.1f} s, {mb(image_size(exported))} MB")
    starts_lazily(node, exported)


def starts_lazily(node, exported):
    """Expect that a start of what was exported fetches a part, and shows what was built."""
    nerdctl = Nerdctl(node)
    with node.registry.counted() as traffic:
        nerdctl("pull", "--quiet", exported)
        expect("v=" in nerdctl.run(exported, "redis-server", "--version"), "its version")
    expect(nerdctl.run(exported, "cat", "/built") == "built\n", "what was built")
    size = image_size(exported)
    expect(traffic.bytes < 0.7 * size, f"{traffic.bytes} of {size} bytes for a start")
    saw("pull, run of what was exported", "lazy", f"{mb(traffic.bytes)} of {mb(size)} MB fetched")


def measure(work):
    """Seconds and bytes until the first step of a build has ended, on nodes that have nothing."""
    with scene(work / "images", "stargz") as images:
        references = images.publish(BIG, ["ordinary", "indexed"])
        with link(images.registry.address, ROUND_TRIP_MS, MEGABITS) as far:
            starts = {form: [] for form in references}
            for turn in range(ROUNDS):
                for form in references:
                    base = references[form].replace(images.registry.address, far)
                    with scene(work / f"{form}-{turn}", "stargz", "", images) as node:
                        starts[form].append(first_step(node, form, far, base))
    print(f"until a first RUN of {BIG} has ended, {ROUND_TRIP_MS} ms and {MEGABITS} Mbit/s:")
    medians = {}
    for form, mine in starts.items():
        seconds, fetched = (median(values) for values in zip(*mine))
        medians[form] = fetched
        name = "overlayfs" if form == "ordinary" else form
        saw("FROM, RUN", name, f"{seconds:.2f} s, {mb(fetched)} MB")
    expect(medians["indexed"] < 0.5 * medians["ordinary"], "the indexed image is lazy")


def first_step(node, form, far, base):
    """Seconds that a build takes, and bytes from the registry meanwhile."""
    snapshotter = "overlayfs" if form == "ordinary" else node.plugin
    with buildkit(node, snapshotter, far) as build:
        drop_caches()
        with node.registry.counted() as traffic:
            began = time.monotonic()
            build(base, BIG_STEP)
            seconds = time.monotonic() - began
    return seconds, traffic.bytes
