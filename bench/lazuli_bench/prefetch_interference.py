"""Measures the waits of an image's readers while another image is prefetched whole.

Eight readers read files of an image, each of them once, in random order. A file is one chunk of 256
KiB that does not compress, as much as a reader fetches at once by default, so every read waits for
the registry, which is behind a wire of 20 ms and 1 Gbit/s as of `lazuli-bench prefetch`. Each round
does that on two nodes, in turn:

  alone   nothing else goes on
  beside  `lazuli prefetch` fetches gcc, or IMAGE, from the same registry

A node is new; its daemon runs, the readers' image is mounted, and each reader has read some files
that do not count. Only reads that begin while the prefetch goes on count.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from lab import REPOSITORY, corpus, drop_caches, end, fair_scheduling, machine, megabytes, need_root, scratch, table
from lab.lazuli import Node, lazuli
from lab.link import link
from lab.registry import remote_registry

BIG = "gcc"
READERS, READS, FIRST = 8, 125, 4
SIZE = 256 << 10
ROUND_TRIP_MS, MEGABITS = 20, 1000
ARMS = ["alone", "beside"]
QUIET = '[prefetch]\nahead = "nothing"\nrest_bytes_per_second = 0\n'


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default=BIG)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/beside.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(args.image)
    arms = []
    with scratch("beside") as work, remote_registry(work / "registry") as server, fair_scheduling():
        prepare(server, work, f"oci:{directory / args.image}:latest")
        with link(server.address, ROUND_TRIP_MS, MEGABITS) as far:
            for turn in range(args.rounds):
                for arm in ARMS[::(-1) ** turn]:
                    arms.append(one(arm, args.image, server, far, work))
                    print(f"round {turn + 1}, {arm}: p99 {percentile(arms[-1]['milliseconds'], 99):.1f} ms", file=sys.stderr)
    report = {"machine": machine(), "round_trip_ms": ROUND_TRIP_MS, "megabits": MEGABITS, "readers": READERS,
              "read_bytes": SIZE, "prefetched": args.image, "arms": arms}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report) + "\n")
    print(summary(report))


def prepare(server, work, big):
    """Push the image that is read, and the one that is fetched beside it."""
    files = work / "files"
    files.mkdir()
    for number in range(READERS * (FIRST + READS)):
        (files / str(number)).write_bytes(random.randbytes(SIZE))
    with lazuli(work / "convert") as instance:
        instance("convert", f"dir:{files}", server.reference("read:1"))
        instance("convert", big, server.reference("fetched:1"))


def one(arm, image, server, far, work):
    """One round of one arm."""
    with Node(work / "node", QUIET) as this, this.mounted(f"{far}/read:1", work / "mnt", "auto") as mountpoint:
        files = [mountpoint / str(number) for number in range(READERS * (FIRST + READS))]
        random.shuffle(files)
        drop_caches()
        read_all(files[:READERS * FIRST])
        with prefetch(arm, this, f"{far}/fetched:1") as goes_on:
            began = server.log.stat().st_size
            took = read_all(files[READERS * FIRST:], goes_on)
            traffic = server.traffic(began, server.log.stat().st_size)
    if not took:
        sys.exit(f"{image} was here before any reader had read a file: name a bigger one")
    (work / "mnt").rmdir()
    return {"arm": arm, "load": os.getloadavg()[0], "milliseconds": [round(1000 * seconds, 2) for seconds in took],
            "prefetched_bytes": traffic.bytes - len(took) * SIZE if arm == "beside" else 0}


@contextlib.contextmanager
def prefetch(arm, node, image):
    """Fetch an image, in one of the arms; yields whether that goes on."""
    if arm == "alone":
        yield lambda: True
        return
    process = subprocess.Popen(node.command("prefetch", "--wait", image), stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # Its metadata is there then.
        time.sleep(1)
        yield lambda: process.poll() is None
    finally:
        end(process)


def read_all(files, goes_on=lambda: True):
    """Have the readers read each file once; return the seconds that each read took."""
    took = []

    def reader(mine):
        for path in mine:
            if not goes_on():
                return
            began = time.monotonic()
            with open(path, "rb", buffering=0) as file:
                while file.read(SIZE):
                    pass
            took.append(time.monotonic() - began)

    threads = [threading.Thread(target=reader, args=(files[number::READERS],)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def percentile(values, percent):
    """A percentile of many values, from 1 to 99."""
    return statistics.quantiles(values, n=100)[percent - 1]


def summary(report):
    """One line per arm, over all rounds. The rise is the median of those of the rounds."""
    p99 = {arm: [percentile(one["milliseconds"], 99) for one in report["arms"] if one["arm"] == arm] for arm in ARMS}
    reads = {arm: [ms for one in report["arms"] if one["arm"] == arm for ms in one["milliseconds"]] for arm in ARMS}
    rows = []
    for arm, ms in reads.items():
        rise = 100 * (statistics.median([one / alone for one, alone in zip(p99[arm], p99["alone"])]) - 1)
        fetched = [one["prefetched_bytes"] for one in report["arms"] if one["arm"] == arm]
        rows.append([arm, len(ms), *(f"{percentile(ms, percent):.1f}" for percent in (50, 90, 99)), f"{max(ms):.1f}",
                     f"{rise:+.0f} %", megabytes(statistics.median(fetched))])
    return table(["reads", "number", "p50 ms", "p90 ms", "p99 ms", "longest ms", "p99 rises by", "MB beside"], rows)
