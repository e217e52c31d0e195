"""An operator's view of a node: metrics, and the log line of a failed read."""

import contextlib

from ..images import OPEN
from ..shell import wait
from ..table import expect

ADDED = """
[metrics]
listen = "0.0.0.0:9445"

[fetch]
deadline_seconds = 2

[prefetch]
ahead = "nothing"
rest_bytes_per_second = 0
"""


def observed(cluster):
    """Lazuli with metrics, a short deadline, and nothing that arrives by itself."""
    return configured(cluster, ADDED)


@contextlib.contextmanager
def configured(cluster, added):
    """Lazuli with more in the node's configuration."""
    config = cluster.node.root / "etc/lazuli/config.toml"
    before = config.read_text()
    config.write_text(before + added)
    cluster.node.run("systemctl", "reload", "lazuli")
    try:
        yield
    finally:
        config.write_text(before)
        cluster.node.run("systemctl", "reload", "lazuli")


@contextlib.contextmanager
def registry_away(cluster):
    """The open registry does not answer."""
    cluster.node.run("systemctl", "stop", "registry@open")
    try:
        yield
    finally:
        cluster.node.run("systemctl", "start", "registry@open")
        wait(60, "the registry", lambda: cluster.node.sh("curl -s 127.0.0.1:5000/v2/ > /dev/null && echo yes"))


def scrape(cluster):
    """The samples at the node's address, by name and labels."""
    page = cluster.node.run("curl", "--silent", "--fail", "http://10.123.0.1:9445/metrics")
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def mounts(samples):
    """How many images are mounted, by any driver."""
    return sum(value for name, value in samples.items() if name.startswith("lazuli_mounts{"))


def metrics(cluster):
    """Metrics at the node's address."""
    with observed(cluster):
        before = wait(30, "metrics", lambda: scrape(cluster))
        cluster.run("pod", f"{OPEN}/redis:lazy")
        wait(30, "the mount to be measured", lambda: mounts(scrape(cluster)) >= 1)
        names = {name.partition("{")[0] for name in before}
        expect(not any("redis" in name for name in scrape(cluster)), "an image has become a label")
    return f"{len(names)} metrics at the node's address"


def failed_read(cluster):
    """A read of a pod while the registry is away."""
    image = cluster.images.variant("busybox", "observed", 8 << 20)
    with observed(cluster):
        cluster.run("reader", image)
        read = "cat {} > /dev/null 2>&1 || echo failed"
        # The program itself has to be there.
        expect(cluster.exec("reader", "sh", "-c", read.format("/bin/busybox")) == "", "a file cannot be read")
        with registry_away(cluster):
            said = cluster.exec("reader", "sh", "-c", read.format("/ballast"))
            expect(said == "failed", "everything was there")
            journal = "journalctl -u lazuli --no-pager -o cat | grep 'a read fails' | grep observed"
            line = wait(30, "a line in the log", lambda: cluster.node.sh(journal)).splitlines()[-1]
        for part in ('pod="default/reader"', 'container="main"', 'file="/ballast"', 'cause="timeout"'):
            expect(part in line, f"{part} is not in {line}")
        failed = wait(30, "the failure to be counted", lambda: scrape(cluster)['lazuli_failed_reads_total{cause="timeout"}'])
    return f"EIO; the log names pod, container, image and file, and {failed:.0f} answers are counted"


SCENARIOS = [
    (metrics, "metrics"),
    (failed_read, "a read while the registry is away"),
]
