"""Debian 13's podman, which names layers by their tables of contents.

Its programs come from a Debian system, whose /usr lies over the machine's. The images are made with
the packages that nerdctl and podman use.
"""

import json
import sys

import debian13
import quadlets
import through_mirror
from lab import REPOSITORY, corpus, run
from lab.coldstart import image_size
from lab.oci import Layout
from podman import IMAGE, PROGRAM, UNREAD, Podman, build, from_mirror, scene
from scene import ON_DEMAND, expect, expect_failure, mb, same_trees, saw

sys.path.append(str(REPOSITORY / "tests/compat"))
import seekable

PACKAGES = "podman,runc,skopeo,ca-certificates,systemd-sysv,dbus"
FORMS = {"estargz": "eStargz", "containers-chunked": "zstd:chunked"}


def prepare(work):
    """Make what needs a network."""
    layout = Layout(corpus(IMAGE) / IMAGE)
    maker = seekable.build(work)
    for form in FORMS:
        seekable.make(maker, form, layout, work)
    quadlets.install(debian13.make(work, PACKAGES))


def main(work):
    debian13.lay_over(work)
    print(run("podman", "--version").decode().strip(), flush=True)
    with scene(work / "scene-lazy") as node:
        image = node.publish(IMAGE, ["lazy"])["lazy"]
        expect_failure(lambda: Podman(node)("pull", "--quiet", image), "unsupported format")
        saw("podman pull", "lazy", "refused: podman does not know layers of data")
    for form in ("ordinary", "indexed", *FORMS):
        with scene(work / f"scene-{form}") as node:
            everything(node, form, work)
        with scene(work / f"build-{form}") as node:
            build_on(node, form, work)
    with scene(work / "mirror", ON_DEMAND + through_mirror.SETTINGS) as node:
        from_mirror(node)
    # Last, since this leaves the namespaces' network.
    quadlets.main(work / "system", work / "estargz", FORMS["estargz"], work / "quadlets")


def everything(node, form, work):
    podman, name, lazy = Podman(node), FORMS.get(form, form), form in FORMS
    image, ordinary = publish(node, form, work), publish(node, "ordinary", work)
    size = image_size(image)
    with node.registry.counted() as traffic:
        podman("pull", "--quiet", image)
        expect("v=" in podman.run(image, *PROGRAM), "redis-server says its version")
    expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a start")
    from_store, layers = podman.lazy_layers()
    expect(from_store == (layers if lazy else 0), f"{from_store} of {layers} layers are lazy")
    saw("podman pull, run", name, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")
    if lazy:
        recorded(podman, name)

    box = f"box-{form}"
    podman("run", "--detach", "--name", box, *podman.options, "--user", "root", image,
           "sleep", "10000")
    podman("exec", box, "sh", "-c", "echo written > /new && rm /etc/debian_version")
    node.kill_worker()
    with node.registry.counted() as traffic:
        unread = podman("exec", box, "sha256sum", UNREAD)
    expect((traffic.bytes > 0) == lazy, f"{traffic.bytes} bytes fetched for {UNREAD}")
    saw("podman exec after kill -9 of the worker", name, f"{mb(traffic.bytes)} MB fetched")
    expect("v=" in podman.run(image, *PROGRAM), "a container starts with the new worker")

    committed = image.replace(":1", ":committed")
    commit = ["commit", "--quiet", box, committed]
    if form == "containers-chunked":
        # podman copies layers of which it knows no DiffID, and GNU tar has padded those of the
        # image.
        expect_failure(lambda: podman(*commit), "inconsistent layer size")
        saw("podman commit", name, "refused: inconsistent layer size")
    else:
        with node.registry.counted() as traffic:
            podman(*commit)
        saw("podman commit", name, f"{mb(traffic.bytes)} MB fetched")
        with node.registry.counted() as traffic:
            podman("push", "--quiet", committed)
        saw("podman push of the commit", name, f"{mb(traffic.bytes)} MB fetched")
        podman("rmi", "--force", committed)
        check = ["sh", "-c", "cat /new; ls /etc/debian_version || sha256sum " + UNREAD]
        shown = podman.run(committed, *check)
        expect(shown == f"written\n{unread}", f"the pushed image shows {shown}")
    podman("rm", "--force", "--time", 0, box)

    # The ordinary image has the files of the others; podman's own pull of eStargz shows more.
    own = Podman(node, "own", lazy=False)
    own("pull", "--quiet", ordinary)
    expected, found = own.tree(ordinary), podman.tree(image)
    count = same_trees(whole_seconds(expected), whole_seconds(found))
    saw("tree beside podman's own", name, f"{count} entries are equal")

    with node.registry.counted() as traffic:
        podman("save", "--quiet", "--output", node.work / "saved.tar", image)
    own("load", "--quiet", "--input", node.work / "saved.tar")
    saw("podman save", name, f"{mb(traffic.bytes)} MB fetched")

    podman("rmi", "--all", "--force")
    mounts = node.status()["mounts"]
    expect(not mounts, f"nothing is mounted: {mounts}")


def build_on(node, form, work):
    """A build, which copies the layers of a lazy base as `commit` does."""
    name, image = FORMS.get(form, form), publish(node, form, work)
    if form == "containers-chunked":
        expect_failure(lambda: build(node, name, image, False), "inconsistent layer size")
        saw("podman build", name, "refused: inconsistent layer size")
    else:
        build(node, name, image, False)


def publish(node, form, work):
    """An image of the corpus in one of the forms."""
    if form not in FORMS:
        return node.publish(IMAGE, [form])[form]
    image = f"{node.registry.address}/{form}/{IMAGE}:1"
    node.lazuli("copy", f"oci:{work / form}:latest", image)
    return image


def recorded(podman, name):
    """By what podman knows its lazy layers: their tables alone."""
    layers = json.loads((podman.storage / "overlay-layers/layers.json").read_text())
    for layer in layers:
        digests = {key for key in layer if key.endswith("-digest")}
        expect(digests == {"toc-digest"}, f"a layer that is known by its table: {layer}")
    saw("podman's records", name, f"{len(layers)} layers are known by their tables alone")


def whole_seconds(lines):
    return seekable.whole_seconds(line.encode() for line in lines)
