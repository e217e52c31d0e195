"""Debian 13's dockerd, with the image store of its containerd.

Their programs come from a Debian system, whose /usr lies over the machine's.
"""

import contextlib
import json
import os
import subprocess

import debian13
import through_mirror
from lab import background, corpus, run
from lab.coldstart import image_size
from scene import FORMS, ON_DEMAND, TIMEOUT, expect, expect_failure, mb, same_trees, saw, scene

IMAGE = "redis"
PROGRAM = ["redis-server", "--version"]
UNREAD = "/usr/bin/perl"
PACKAGES = "docker.io,docker-cli,docker-buildx,containerd,runc,ca-certificates"

# containerd 1.7's.
CONTAINERD = """\
version = 2
root = "{work}/containerd"
state = "{work}/run"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri",
  "io.containerd.grpc.v1.cri"]
[grpc]
  address = "{work}/containerd.sock"
[ttrpc]
  address = "{work}/containerd.sock.ttrpc"
[proxy_plugins.{plugin}]
  type = "snapshot"
  address = "{work}/lazuli.sock"
"""


def prepare(work):
    """Make what needs a network."""
    corpus(IMAGE)
    debian13.make(work, PACKAGES)


def main(work):
    debian13.lay_over(work)
    os.environ["LAZULI_CONTAINERD"] = "/usr/bin"
    for form in FORMS:
        with scene(work / form, "lazuli", config=CONTAINERD) as node, dockerd(node) as docker:
            everything(node, docker, form)
    settings = ON_DEMAND + through_mirror.SETTINGS
    with scene(work / "mirror", settings=settings, config=CONTAINERD) as node:
        from_mirror(node)


@contextlib.contextmanager
def dockerd(node, **added):
    """A dockerd with more in its configuration; yields the command `docker`."""
    work, name = node.work, node.work.parent.name
    config = {
        "features": {"containerd-snapshotter": True}, "storage-driver": node.plugin,
        "containerd": str(node.socket), "containerd-namespace": name,
        "hosts": [f"unix://{work}/docker.sock"], "data-root": f"{work}/docker",
        "exec-root": f"{work}/docker-run", "pidfile": f"{work}/docker.pid", "bridge": "none",
        "iptables": False, "cgroup-parent": f"/{name}",
        "exec-opts": ["native.cgroupdriver=cgroupfs"], **added,
    }
    (work / "daemon.json").write_text(json.dumps(config))
    command = ["dockerd", "--config-file", work / "daemon.json"]

    client = ["/usr/bin/docker", "--host", f"unix://{work}/docker.sock"]

    def ready():
        return subprocess.run([*client, "version"], capture_output=True).returncode == 0

    with background(*command, log=work / "dockerd.log", timeout=TIMEOUT, ready=ready):
        yield lambda *verb: run(*client, *verb).decode()


def everything(node, docker, form):
    images, lazy = node.publish(IMAGE, {"ordinary", form}), form != "ordinary"
    image, size = images[form], image_size(images[form])
    once, name = ["run", "--rm", "--network", "none"], f"box-{form}"
    with node.registry.counted() as traffic:
        docker("pull", "--quiet", image)
        expect("v=" in docker(*once, image, *PROGRAM), "redis-server says its version")
    expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a start")
    saw("docker pull, run", form, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")

    docker("run", "--detach", "--name", name, "--network", "none", "--user", "root", image,
           "sleep", "10000")
    docker("exec", name, "sh", "-c", "echo written > /new && rm /etc/debian_version")
    node.kill_worker()
    with node.registry.counted() as traffic:
        unread = docker("exec", name, "sha256sum", UNREAD)
    expect((traffic.bytes > 0) == lazy, f"{traffic.bytes} bytes fetched for {UNREAD}")
    saw("docker exec after kill -9 of the worker", form, f"{mb(traffic.bytes)} MB fetched")

    with node.registry.counted() as traffic:
        build(node, docker, image, image.replace(":1", ":built"))
    saw("docker build, run, push", form, f"{mb(traffic.bytes)} MB fetched")

    committed = image.replace(":1", ":committed")
    with node.registry.counted() as traffic:
        docker("commit", name, committed)
    docker("push", "--quiet", committed)
    docker("rmi", "--force", committed)
    check = ["sh", "-c", "cat /new; ls /etc/debian_version || sha256sum " + UNREAD]
    shown = docker(*once, committed, *check)
    expect(shown == f"written\n{unread}", f"the pushed image shows {shown}")
    saw("docker commit, push, run", form, f"{mb(traffic.bytes)} MB fetched by the commit")
    docker("rm", "--force", name)

    mine, other = node.work.parent.name, f"{node.work.parent.name}-other"
    node.ctr(other, "image", "pull", "--plain-http", "--snapshotter", "overlayfs",
             images["ordinary"])
    expected = node.tree(other, "overlayfs", images["ordinary"])
    count = same_trees(expected, node.tree(mine, node.plugin, image))
    saw("tree beside overlayfs", form, f"{count} entries are equal")


def from_mirror(node):
    """A mirror at a loopback address, which dockerd asks without TLS, whatever its URL says."""
    image = node.publish(IMAGE, ["ordinary"])["ordinary"]
    through_mirror.set_up(node, "docker.io", "docker")
    with dockerd(node, **{"registry-mirrors": [f"https://{through_mirror.LISTEN}"]}) as docker:
        name = image.replace(node.registry.address, "docker.io")
        expect_failure(lambda: docker("pull", "--quiet", name), "malformed HTTP response")
    saw("docker pull through the mirror", "ordinary", "dockerd speaks HTTP without TLS to it")


def build(node, docker, image, built):
    """An image of a step on top of another image, from the registry."""
    directory = node.work / "context"
    directory.mkdir()
    (directory / "Dockerfile").write_text(f"FROM {image}\nUSER root\nRUN echo {built} > /it\n")
    docker("build", "--quiet", "--network", "none", "--tag", built, directory)
    expect(docker("run", "--rm", "--network", "none", built, "cat", "/it") == f"{built}\n", built)
    docker("push", "--quiet", built)
