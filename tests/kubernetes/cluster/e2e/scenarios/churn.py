"""Pods of many images come and go; the cache holds half of their data."""

import contextlib
import hashlib
import itertools
import os
import time

from ..images import OPEN
from ..shell import wait
from ..table import expect
from .observing import configured

MIB = 1 << 20
IMAGES, BALLAST = 30, 24 * MIB
AT_ONCE = 20
# The pods that run at once need twice as much.
BUDGET = AT_ONCE * BALLAST // 2
READ = 'while sum=$(md5sum < /ballast) && [ "$sum" = "$0" ]; do sleep 5; done; exit 1'
# Seconds between a pod and the next one.
EACH = 4
# Seconds between deaths of the worker, at most. A new one evicts nothing in use in its first
# minute.
DEATH = 180


def churn(cluster):
    """No read fails and none is wrong, the summary always answers, the disk stays within the
    kubelet's thresholds."""
    images = []
    for number in range(IMAGES):
        content = os.urandom(BALLAST)
        image = cluster.images.with_ballast("busybox", content, f"{OPEN}/busybox:churn{number}")
        images.append((image, hashlib.md5(content).hexdigest()))
    with configured(cluster, f"\n[cache]\nmax_bytes = {BUDGET}\n"):
        return come_and_go(cluster, itertools.cycle(images))


def come_and_go(cluster, images):
    """Until the time is over."""
    ends = time.monotonic() + cluster.minutes * 60
    death = min(DEATH, cluster.minutes * 60 / 2)
    running, started, summaries, deaths, largest = [], 0, 0, 0, 0
    killed = time.monotonic()
    while time.monotonic() < ends:
        next_pod = time.monotonic() + EACH
        image, checksum = next(images)
        name = f"pod{started}"
        cluster.start(name, image, command=("sh", "-c", READ, f"{checksum}  -"), restartPolicy="Never")
        running.append(name)
        started += 1
        if len(running) > AT_ONCE:
            gone = running.pop(0)
            expect(phase(cluster, gone) == "Running", f"{gone} is {phase(cluster, gone)}: {cluster.events(gone)}")
            cluster.delete(gone)
        if time.monotonic() - killed > death:
            killed = time.monotonic()
            kill_worker(cluster)
            deaths += 1
        expect(cluster.summary()["node"]["runtime"]["imageFs"]["availableBytes"], "the summary does not count the images")
        summaries += 1
        expect(cluster.condition("DiskPressure") == "False", "the node is under disk pressure")
        with contextlib.suppress(Exception):
            largest = max(largest, cluster.status()["daemon"]["cache"]["bytes_used"])
        time.sleep(max(0, next_pod - time.monotonic()))
    for name in running:
        wait(60, f"{name} to run", lambda name=name: phase(cluster, name) == "Running")
    failed = cluster.status()["failed_reads"]
    expect(not failed, f"reads failed: {failed}")
    return (f"{started} pods of {IMAGES} images in {cluster.minutes} minutes, {AT_ONCE} at once, {deaths} deaths of the worker: no read failed or was wrong, "
            f"{summaries} summaries answered, the cache had {largest // MIB} MiB at most with a limit of {BUDGET // MIB}")


def phase(cluster, name):
    """The state of a pod."""
    return cluster.get("pod", name)["status"].get("phase")


def kill_worker(cluster):
    """kill -9, and waits for another one."""
    before = cluster.status()["daemon"]["worker_pid"]
    cluster.node.run("kill", "-KILL", before)
    wait(30, "another worker", lambda: cluster.status()["daemon"]["worker_pid"] != before)


SCENARIOS = [(churn, "pods of many images come and go, with room for half of what they need")]
