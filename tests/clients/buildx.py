"""`docker buildx`, Debian 13's, with the BuildKit of buildkit.py that exports lazy images.

It needs no dockerd for that.
"""

import os
import time

import buildkit
import debian13
from buildkit import IMAGE, NYDUS, STEP
from lab import corpus, run
from lab.coldstart import image_size
from scene import expect, mb, saw, scene

PACKAGES = "docker-cli,docker-buildx,ca-certificates"


def prepare(work):
    """Make what needs a network."""
    corpus(IMAGE)
    buildkit.programs()
    debian13.make(work, PACKAGES)


def main(work):
    debian13.lay_over(work)
    for form in ("ordinary", "indexed"):
        with scene(work / form, "stargz") as node:
            exported = everything(node, form)
            # What the first node has fetched would be missing in the bytes of a start.
            with scene(work / f"start-{form}", "stargz", images=node) as other:
                buildkit.starts_lazily(other, exported)


def buildx(node):
    """What `docker buildx build` of one step is with the node's BuildKit."""
    environment = os.environ | {"DOCKER_CONFIG": str(node.work / "docker")}
    command = ["/usr/bin/docker", "buildx"]
    address = f"unix://{node.work}/buildkitd.sock"
    run(*command, "create", "--name", "far", "--driver", "remote", address, env=environment)

    def build(base, step, *options):
        directory = buildkit.context(node, base, step)
        run(*command, "build", "--builder", "far", *options, directory, env=environment)

    return build


def everything(node, form):
    """A step on an image, and a lazy image of both; returns its reference."""
    base = node.publish(IMAGE, {form})[form]
    size, exported = image_size(base), base.replace(":1", ":nydus")
    with buildkit.exporter(node, node.plugin):
        build = buildx(node)
        with node.registry.counted() as traffic:
            build(base, STEP)
        lazy = form == "indexed"
        expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a step")
        saw("FROM, RUN", form, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")
        began = time.monotonic()
        with node.registry.counted() as traffic:
            build(base, STEP, "--output", f"type=image,name={exported},push=true,{NYDUS}")
        saw("exported", form, f"{time.monotonic() - began:.1f} s, {mb(traffic.bytes)} MB fetched, "
            f"{mb(image_size(exported))} MB")
    index = run("skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{exported}")
    # buildx adds it unless it is told not to.
    expect(b"attestation-manifest" in index, f"provenance in {index}")
    return exported
