"""The node: a Debian system on a disk of its own, booted in namespaces."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from . import certificates
from .docs import REPOSITORY
from .shell import PATIENCE, run, wait

HERE = REPOSITORY / "tests/kubernetes/cluster"
FILES = HERE / "files"
PACKAGES = ("systemd systemd-sysv dbus procps iproute2 iptables mount kmod e2fsprogs ca-certificates conntrack socat uidmap "
            "libseccomp2 containernetworking-plugins docker-registry apache2-utils openssl curl").split()
DISK = 8 << 30
CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()

PLACES = {
    "start-kubelet": "usr/local/sbin",
    "kubelet.yaml": "etc/kubernetes",
    "network.conflist": "etc/cni/net.d",
    "open.yml": "etc/registry",
    "private.yml": "etc/registry",
    "site.toml": "etc/containerd/conf.d",
}
EVERYWHERE = ("share-mounts", "containerd", "api-service", "kubelet")
FIRST = (*EVERYWHERE, "registry@open", "registry@private", "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
# The registries are the first node's.
OTHERS = (*EVERYWHERE, "forward@5000", "forward@5001")


class Node:
    """A node. `with` makes and boots it, and takes away whatever is left of it.

    The first one has the control plane and the registries; another one joins it.
    """

    def __init__(self, corpus, name="node1", address="10.123.0.1", first=None):
        self.corpus, self.name, self.address, self.first = corpus, name, address, first
        self.pid = None

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.scratch = Path(tempfile.mkdtemp(prefix="lazuli-e2e-", dir="/var/tmp"))
            stack.callback(shutil.rmtree, self.scratch)
            self.cgroup = self.scratch.name
            stack.callback(remove_cgroups, self.cgroup)
            self.root = stack.enter_context(disk(self.scratch))
            self.prepare()
            stack.callback(self.end)
            self.boot()
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        return self.stack.__exit__(None, None, None)

    def prepare(self):
        """Fills the disk."""
        run("tar", "-C", self.root, "-xf", system())
        configuration = self.root / "etc/kubernetes"
        if not self.first:
            certificates.make(configuration)
        certificates.join(configuration, (self.first or self).root / "etc/kubernetes", self.name)
        (configuration / "node").write_text(f"NAME={self.name}\nADDRESS={self.address}\n")
        programs = self.root / "usr/local/bin"
        kubernetes = Path(run(REPOSITORY / "scripts/kubernetes"))
        containerd = Path(run(REPOSITORY / "scripts/containerd"))
        run("cp", "-a", *kubernetes.iterdir(), *(containerd / name for name in ("containerd", "ctr", "containerd-shim-runc-v2")), programs)
        for file in FILES.iterdir():
            place = PLACES.get(file.name, "etc/systemd/system")
            (self.root / place).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, self.root / place)
        # With v2, what kubeadm chooses.
        self.cgroup_driver("systemd" if CGROUP_V2 else "cgroupfs")
        (self.root / "etc/systemd/system.conf.d").mkdir(exist_ok=True)
        (self.root / "etc/systemd/system.conf.d/patience.conf").write_text(f"[Manager]\nDefaultTimeoutStartSec={90 * PATIENCE:.0f}\n")
        (self.root / "etc/hosts").write_text("127.0.0.1 localhost\n10.123.0.1 node1\n")
        (self.root / "etc/containerd/config.toml").write_text(run(containerd / "containerd", "config", "default"))
        (self.root / "etc/containerd/certs.d").mkdir()
        (self.root / "test").mkdir()
        for name in OTHERS if self.first else FIRST:
            unit = f"{name}.service"
            wants = self.root / "etc/systemd/system/multi-user.target.wants"
            wants.mkdir(exist_ok=True)
            source = unit if "@" not in unit else f"{unit.split('@')[0]}@.service"
            (wants / unit).unlink(missing_ok=True)
            (wants / unit).symlink_to(f"/etc/systemd/system/{source}")
        for name in ("open", "private"):
            (self.root / "var/lib/registry" / name).mkdir(parents=True)
        run("chroot", self.root, "htpasswd", "-Bbc", "/etc/registry/passwords", "puller", "secret")
        run("chroot", self.root, "systemctl", "disable", "docker-registry", "apt-daily.timer", "apt-daily-upgrade.timer")

    def cgroup_driver(self, driver):
        """Configures kubelet and runc for it."""
        kubelet = self.root / "etc/kubernetes/kubelet.yaml"
        lines = [f"cgroupDriver: {driver}" if line.startswith("cgroupDriver:") else line for line in kubelet.read_text().splitlines()]
        kubelet.write_text("\n".join(lines) + "\n")
        runc = self.root / "etc/containerd/conf.d/runc.toml"
        runc.write_text("version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc.options]\n"
                        f"  SystemdCgroup = {str(driver == 'systemd').lower()}\n")

    def boot(self):
        """Starts the node's first process."""
        self.log = open(self.scratch / "systemd.log", "w")
        joined = [self.name, str(self.first.pid)] if self.first else []
        self.process = subprocess.Popen([HERE / "boot", self.root, self.cgroup, self.corpus, self.address, *joined], stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)
        self.pid = wait(30, "the node's first process", self.first_process)
        self.sh("systemctl is-system-running --wait || true", timeout=120)

    def first_process(self):
        """The process id of the node's systemd, once it is one."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the node does not boot: {(self.scratch / 'systemd.log').read_text()[-2000:]}")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        # Other children come and go before.
        with contextlib.suppress(FileNotFoundError):
            if children and Path(f"/proc/{children[0]}/comm").read_text() == "systemd\n":
                return int(children[0])
        return None

    def reboot(self):
        """Powers the node off and boots it again, with the same disk."""
        with contextlib.suppress(Exception):
            self.sh("systemctl --force poweroff", timeout=60)
        try:
            self.process.wait(90 * PATIENCE)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self.process.wait(30)
        remove_cgroups(self.cgroup)
        self.boot()

    def end(self):
        """Ends everything that runs in it."""
        if self.process.poll() is None:
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
        self.log.close()

    def inside(self, *command, environment=()):
        """A command line that runs `command` in the node."""
        return ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--",
                "env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/opt/lazuli/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root",
                "KUBECONFIG=/etc/kubernetes/admin.conf", *environment, *command]

    def run(self, *command, **options):
        """Runs a program of the node."""
        return run(*self.inside(*map(str, command)), **options)

    def sh(self, script, **options):
        """Runs a script in the node."""
        return self.run("bash", "-euo", "pipefail", "-c", script, **options)

    def status(self):
        """What its Lazuli serves."""
        return json.loads(self.run("lazuli", "status", "--json"))

    def beside(self, *command, **options):
        """Runs a program of this machine with the node's network."""
        return run("nsenter", "--target", self.pid, "--net", "--", *command, **options)

    def free(self):
        """Bytes that the node's disk has left, and its size."""
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


@contextlib.contextmanager
def disk(scratch):
    """A file system of its own: the kubelet's figures and evictions are about its disk."""
    image, root = scratch / "disk", scratch / "root"
    with open(image, "wb") as file:
        file.truncate(DISK)
    run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1", image)
    device = run("losetup", "--find", "--show", image)
    try:
        root.mkdir()
        run("mount", device, root)
        try:
            yield root
        finally:
            # What a process that is just ending has mounted is gone a moment later.
            for _ in range(50):
                if subprocess.run(["umount", "--recursive", root], capture_output=True).returncode == 0:
                    break
                time.sleep(0.2)
            else:
                run("umount", "--lazy", "--recursive", root)
    finally:
        run("losetup", "--detach", device)


def system():
    """A Debian system as a tar, made once."""
    file = REPOSITORY / "target/kubernetes/system.tar"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.tar")
        run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", "bookworm", part)
        part.rename(file)
    return file


def remove_cgroups(name):
    """Removes the groups with this name in all hierarchies, innermost first."""
    for group in Path("/sys/fs/cgroup").glob(f"**/{name}"):
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
