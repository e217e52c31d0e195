"""CRI-O, which finds layers in Lazuli's layer store by their tables of contents, as podman 5 does.

Containers are started through Kubernetes' interface, without a kubelet.
"""

import contextlib
import os
import subprocess

from lab import REPOSITORY, background, corpus, run
from lab.coldstart import image_size
from lab.containerd import cri_program, listens
from lab.oci import Layout
from podman import IMAGE, REGISTRIES, STORAGE, UNREAD, scene
from podman5 import FORMS, seekable
from scene import TIMEOUT, expect, expect_failure, mb, saw

CRIO = """\
[crio]
log_dir = "{work}/logs"
version_file = "{work}/version"
clean_shutdown_file = "{work}/clean"
internal_wipe = false
[crio.api]
listen = "{work}/crio.sock"
stream_port = "0"
[crio.runtime]
conmon_cgroup = "pod"
cgroup_manager = "cgroupfs"
pinns_path = "{programs}/pinns"
namespaces_dir = "{work}/namespaces"
container_exits_dir = "{work}/exits"
container_attach_socket_dir = "{work}/attach"
apparmor_profile = "unconfined"
default_runtime = "runc"
[crio.runtime.runtimes.runc]
runtime_path = "{runc}"
runtime_root = "{work}/runc"
monitor_path = "/usr/bin/conmon"
[crio.image]
pause_image = "{registry}/pause:1"
signature_policy = "{work}/policy.json"
[crio.network]
network_dir = "{work}/cni"
plugin_dirs = ["/usr/lib/cni"]
[crio.nri]
enable_nri = false
"""

NETWORK = '{"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}\n'

# Every file of an image, in one number.
SUM = "find / -xdev -type f | sort | xargs -d '\\n' sha256sum | sha256sum"


def prepare(work):
    """Make what needs a network."""
    layout = Layout(corpus(IMAGE) / IMAGE)
    maker = seekable.build(work)
    for form in FORMS:
        seekable.make(maker, form, layout, work)
    built = subprocess.check_output([REPOSITORY / "scripts/crio"], text=True)
    os.environ["LAZULI_CRIO"] = built.strip()


def main(work):
    with scene(work / "scene-lazy") as node, crio(node) as cri:
        image = node.publish(IMAGE, ["lazy"])["lazy"]
        expect_failure(lambda: cri("pull", image), "unsupported format")
        saw("pull", "lazy", "refused: CRI-O does not know layers of data")
    sums = set()
    for form in ("ordinary", "indexed", *FORMS):
        with scene(work / f"scene-{form}") as node, crio(node) as cri:
            sums.add(everything(node, cri, form, work))
    expect(len(sums) == 1, f"the same files in each form: {sums}")
    saw("every file", "each form", "the content is the same")


@contextlib.contextmanager
def crio(node):
    """A CRI-O whose storage finds layers in the node's layer store; yields the command `cri`."""
    work, programs = node.work, os.environ["LAZULI_CRIO"]
    runc = run("sh", "-c", "command -v runc").decode().strip()
    files = {
        "crio.conf": CRIO.format(work=work, programs=programs, runc=runc,
                                 registry=node.registry.address),
        "storage.conf": STORAGE.format(
            work=work, name="crio", layers=f'additionallayerstores = ["{work}/layers:ref"]'),
        "registries.conf": REGISTRIES.format(registry=node.registry.address),
        "policy.json": '{"default": [{"type": "insecureAcceptAnything"}]}\n',
        "cni/10-none.conflist": NETWORK,
    }
    for name, content in files.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(content)
    pause = work / "pause.tar"
    run(cri_program(), "pause", "pause:1", pause)
    node.registry.push(f"oci-archive:{pause}", "pause:1")
    environment = os.environ | {
        "CONTAINERS_STORAGE_CONF": f"{work}/storage.conf",
        "CONTAINERS_REGISTRIES_CONF": f"{work}/registries.conf",
    }
    socket = work / "crio.sock"
    command = [f"{programs}/crio", "--config", work / "crio.conf", "--config-dir", ""]
    with background(*command, log=work / "crio.log", timeout=TIMEOUT, env=environment,
                    ready=lambda: listens(socket)):
        yield lambda *verb: run(cri_program(), socket, *verb).decode()


def everything(node, cri, form, work):
    name, lazy = FORMS.get(form, form), form in FORMS
    if lazy:
        image = f"{node.registry.address}/{form}/{IMAGE}:1"
        node.lazuli("copy", f"oci:{work / form}:latest", image)
    else:
        image = node.publish(IMAGE, [form])[form]
    size = image_size(image)
    with node.registry.counted() as traffic:
        cri("pull", image)
        shown = cri("run", "first", image, "redis-server", "--version")
    expect("v=" in shown, f"redis-server says its version: {shown}")
    expect((traffic.bytes < 0.7 * size) == lazy, f"{traffic.bytes} of {size} bytes for a start")
    saw("pull, run", name, f"{mb(traffic.bytes)} of {mb(size)} MB fetched")

    sandbox, container = cri("start", "second", image, "sleep", "10000").split()
    node.kill_worker()
    with node.registry.counted() as traffic:
        cri("exec", container, "sha256sum", UNREAD)
    expect((traffic.bytes > 0) == lazy, f"{traffic.bytes} bytes fetched for {UNREAD}")
    saw("exec after kill -9 of the worker", name, f"{mb(traffic.bytes)} MB fetched")
    total = cri("exec", container, "sh", "-c", SUM)
    cri("rm", sandbox)

    cri("rmi", image)
    mounts = node.status()["mounts"]
    expect(not mounts, f"nothing is mounted: {mounts}")
    return total
