"""Measures untraced first starts: chunks, misses, requests, bytes, seconds.

Each image starts with its own command until it is ready, on a node that has nothing of it, with the
registry behind a wire. The counts are of the daemon and of the registry, and hardly depend on what
else the machine does; seconds do.

  guess      what follows from the image alone
  escalate   and what the misses of the start bring
  traced     what an earlier start has read
  next       what an earlier start of another image has read, with `--taught-by`: the next version, another repository

`missed` is how many of the chunks that the start reads were neither here nor on their way, and
would not have been asked for.
"""

import argparse
import json
import re
import shutil
import sys
import time
from pathlib import Path

from lab import REPOSITORY, corpus, drop_caches, fair_scheduling, machine, median, megabytes, need_root, scratch, table, wait_until
from lab.lazuli import Node
from lab.link import link
from lab.registry import remote_registry
from lab.workload import ready_when, until_ready

SYSTEMS = {
    "guess": ("guess", 0),
    "escalate": ("guess", 256 << 20),
    "traced": ("learn", 0),
    "next": ("learn", 256 << 20),
}
OVER = re.compile(r"touched[^=]*=\D*(\d+).*?missed[^=]*=\D*(\d+)")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--round-trip", type=float, default=20, help="milliseconds to the registry [20]")
    parser.add_argument("--megabits", type=int, default=1000, help="per second [1000]")
    parser.add_argument("--taught-by", help="an image whose start the node has seen before")
    parser.add_argument("--same-repository", action="store_true", help="of which the images are next versions")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/starts.json")
    args = parser.parse_args(argv)
    need_root()
    taught = [args.taught_by] if args.taught_by else []
    directory = corpus(*args.images, *taught)
    report = {"machine": machine(), "round_trip_ms": args.round_trip, "megabits": args.megabits, "starts": []}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    systems = [name for name in SYSTEMS if taught or name != "next"]
    with scratch("starts") as work, remote_registry(work / "registry") as server, fair_scheduling():
        with link(server.address, args.round_trip, args.megabits) as far:
            for name in args.images:
                bench = Bench(name, args, server, far, work, directory)
                for turn in range(args.rounds):
                    for system in systems[turn % len(systems):] + systems[:turn % len(systems)]:
                        report["starts"].append(bench.start(system))
                        print(json.dumps(report["starts"][-1]), file=sys.stderr, flush=True)
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report, systems))


class Bench:
    """One image, and what earlier starts have left."""

    def __init__(self, name, args, server, far, work, directory):
        self.name, self.server, self.far, self.work = name, server, far, work
        self.learnt = work / f"learnt-{name}"
        self.taught = work / f"taught-{name}"
        self.image = f"{name}:lazy"
        self.teach(name, self.image, directory, self.learnt, ["traces"])
        if args.taught_by:
            other = f"{name if args.same_repository else args.taught_by}:before"
            self.teach(args.taught_by, other, directory, self.taught, ["lessons"])

    def teach(self, name, image, directory, target, kept):
        """Convert an image, start it once, and keep what the node has learnt."""
        built = self.server.push(f"oci:{directory / name}:latest", f"{image}-built")
        with self.node("teach", "learn", 0, 1) as node:
            node("convert", built, self.server.reference(image))
            until_ready(node.command("run", f"{self.far}/{image}"), ready_when(name))
            for part in kept:
                # A file with an ending is still being written.
                wait_until(lambda part=part: any(not file.suffix for file in (node.root / part).glob("*")), 60, f"{part} of {name}")
                shutil.copytree(node.root / part, target / part)

    def start(self, system):
        """One cold start."""
        ahead, escalate = SYSTEMS[system]
        with self.node("start", ahead, 0, escalate) as node:
            learnt = {"traced": self.learnt, "next": self.taught}.get(system)
            if learnt:
                shutil.copytree(learnt, node.root, dirs_exist_ok=True)
            drop_caches()
            with self.server.counted() as traffic:
                seconds = until_ready(node.command("run", f"{self.far}/{self.image}"), ready_when(self.name))
                # What is on the way was asked for.
                time.sleep(0.3)
            touched, missed = self.counts(node)
        return {"image": self.name, "system": system, "seconds": round(seconds, 3), "touched": touched, "missed": missed,
                "requests": traffic.requests, "bytes": traffic.bytes}

    def node(self, name, ahead, rest, escalate):
        config = f'[prefetch]\nahead = "{ahead}"\nrest_bytes_per_second = {rest}\nescalate_bytes = {escalate}\n'
        return Node(self.work / name, config)

    def counts(self, node):
        """Chunks that the start has read, and missed, as the daemon's log says when it is over."""
        def over():
            log = (node.root / "daemon.log").read_text(errors="replace")
            lines = (line for line in log.splitlines() if "a start is over" in line and f"/{self.image}" in line)
            return next(map(OVER.search, lines), None)

        wait_until(over, 130, "the end of the start")
        return tuple(map(int, over().groups()))


def summary(report, systems):
    """One line per image and way."""
    rows = []
    for image in dict.fromkeys(start["image"] for start in report["starts"]):
        for system in systems:
            mine = [start for start in report["starts"] if (start["image"], start["system"]) == (image, system)]
            middle = {key: median([start[key] for start in mine]) for key in ("seconds", "touched", "missed", "requests", "bytes")}
            rows.append([image, system, f"{middle['seconds']:.2f}", *(str(round(middle[key])) for key in ("touched", "missed", "requests")),
                         megabytes(middle["bytes"])])
    return table(["image", "what is fetched ahead", "seconds", "chunks", "missed", "requests", "MB"], rows)
