"""Measures what many pods of many images take on one node.

usage: lazuli-bench pods [--count N] [--contenders NAME,...] [--json FILE] [IMAGE...]

Images of the corpus are pulled from a registry on loopback, through containerd's CRI service, as in
`lazuli-bench hello`. Then pods are started one after the other, each with a shell that sleeps, of
one image after the other, until every image has several. Lazuli fetches only what containers read.

  ms        of one start, among the first tenth and among the last tenth
  memory    by how much MemAvailable has fallen since nothing was pulled, page caches dropped before
            both; `cached` is what the page cache held besides, before it was dropped the second time
  daemons   resident memory and open descriptors of containerd and the snapshotter's processes
  files     inodes and bytes that the file system of the node's data has given
"""

import argparse
import itertools
import os
import shutil
import sys
import time
from pathlib import Path

from lab import REPOSITORY, corpus, drop_caches, fair_scheduling, median, need_root, scratch, table
from lab.containerd import containerd_version, node, resident
from lab.registry import remote_registry

from . import results
from .density import available, kibibytes
from .hello import choose

# Those of the corpus that have a shell and sleep.
IMAGES = ["busybox", "debian-slim", "debian", "redis", "memcached", "mariadb", "postgres", "lua", "python-slim", "python",
          "perl", "ruby", "php", "openjdk", "nginx", "httpd", "haproxy", "jetty", "flask", "django", "node", "express",
          "registry", "prometheus"]
SLEEP = ["sh", "-c", "exec sleep 1000000"]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("images", nargs="*", default=IMAGES, metavar="IMAGE", help="of bench/corpus, with sh and sleep")
    parser.add_argument("--count", type=int, default=300, help="of pods")
    parser.add_argument("--contenders", default="lazuli", help="names, separated by commas, besides overlayfs")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/pods.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(*args.images)
    here, missing = choose(args.contenders)
    points = []
    with scratch("pods") as work, fair_scheduling(), remote_registry(work / "registry") as server:
        for contender in here:
            for name in args.images:
                push = work / "push"
                push.mkdir()
                contender.publish(f"{directory / name}:latest", server.reference(f"{contender.form}:{name}"), push)
                shutil.rmtree(push)
            references = [f"{server.named(server.address)}/{contender.form}:{name}" for name in args.images]
            points.append({"contender": contender.name, **measure(work / "node", contender, references, args.count)})
            print(f"{contender.title}: {points[-1]['seconds']:.1f} s", file=sys.stderr)
            results.write(args.json, "pods", argv, containerd=containerd_version(), images=args.images, count=args.count,
                          contenders=[{"name": c.name, "title": c.title, "version": c.version()} for c in here],
                          missing=missing, points=points)
    print(summary(points, args.count))


def measure(work, contender, references, count):
    """So many pods of these images on one node."""
    with node(work, contender) as this:
        drop_caches()
        before, given = available(), used_of_disk(work)
        began = time.monotonic()
        for reference in references:
            this.cri("pull", reference)
        times = [time.monotonic()]
        for number in range(count):
            this.cri("start", f"pod-{number}", references[number % len(references)], *SLEEP)
            times.append(time.monotonic())
        daemons = this.daemons()
        point = {"pull_s": times[0] - began, "seconds": times[-1] - times[0],
                 "starts": [round(end - start, 4) for start, end in itertools.pairwise(times)],
                 "rss_bytes": sum(map(resident, daemons)), "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in daemons)}
        cached = kibibytes("/proc/meminfo", "Cached")
        drop_caches()
        taken = [now - then for now, then in zip(used_of_disk(work), given)]
        return point | {"cached_bytes": cached - kibibytes("/proc/meminfo", "Cached"), "machine_bytes": before - available(),
                        "disk_bytes": taken[0], "inodes": taken[1]}


def used_of_disk(path):
    """Bytes and inodes that are in use on a file system."""
    disk = os.statvfs(path)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_files - disk.f_ffree


def summary(points, count):
    """One line for each contender."""
    tenth = max(1, count // 10)
    rows = [[one["contender"], f"{one['pull_s']:.1f}", *(f"{1000 * median(part):.0f}" for part in (one["starts"][:tenth], one["starts"][-tenth:])),
             *(f"{one[key] / 2**20:,.0f}" for key in ("machine_bytes", "cached_bytes", "rss_bytes")), str(one["descriptors"]),
             f"{one['inodes']:,}", f"{one['disk_bytes'] / 1e6:,.0f}"] for one in points]
    return table(["", "pull s", "ms, first", "ms, last", "memory MiB", "cached MiB", "daemons MiB", "descriptors", "inodes", "disk MB"], rows)
