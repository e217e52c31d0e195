"""Measures time to ready with a distant registry, by the data that is prefetched.

Each image of the corpus starts with its own command until it is ready (a line, an answer over HTTP,
or its exit), on a node that has nothing of it, with a daemon that runs. The registry is behind a
wire of 1 Gbit/s on which every byte takes half a round trip, and a new connection one round trip
before its first byte. With slow start, what a connection carries begins with a window of ten
segments that doubles with each round trip, as TCP's; without, the distance is delay and nothing
else.

  warm       everything is on the node, nothing in the page cache
  nothing    what readers ask for, with neighbours
  guess      and what follows from the image's config
  learn      and what a start on another node has read
  optimized  the image that `lazuli optimize` makes of that trace, on a node that knows nothing
  pull       skopeo copy, umoci unpack, runc run

They take turns. `bound` is the time of a warm start, plus the bytes that learn fetches at full
bandwidth, plus four round trips; all are medians of the same rounds.
"""

import argparse
import json
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from lab import REPOSITORY, corpus, drop_caches, fair_scheduling, machine, median, megabytes, need_root, run
from lab import scratch, table, wait_until
from lab.lazuli import Node
from lab.link import link
from lab.registry import remote_registry
from lab.workload import ready_when, until_ready

IMAGES = ["busybox", "lua", "debian-slim", "redis", "python-slim", "python", "nginx", "postgres", "node", "gcc"]
LAZY = ["nothing", "guess", "learn", "optimized"]
MEGABITS = 1000
ROUND_TRIPS = 4
# Those of `docker run` that the images' commands need; umoci leaves them out.
CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID"]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", default=IMAGES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-trips", default="0,20,50", help="milliseconds, separated by commas")
    parser.add_argument("--no-pull", action="store_true", help="leave pull-then-run out")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/prefetch.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(*args.images)
    systems = ["warm", *LAZY] + ([] if args.no_pull else ["pull"])
    starts = []
    report = {"machine": machine(), "megabits": MEGABITS, "starts": starts}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with scratch("prefetch") as work, remote_registry(work / "registry") as server, fair_scheduling():
        for name in args.images:
            bench = Bench(name, server, work)
            bench.prepare(directory)
            with bench.filled():
                for round_trip in map(float, args.round_trips.split(",")):
                    for slow_start in (True, False) if round_trip else (True,):
                        with link(server.address, round_trip, MEGABITS, slow_start) as far:
                            for turn in range(args.rounds):
                                for system in systems[turn % len(systems):] + systems[:turn % len(systems)]:
                                    start = bench.start(system, far)
                                    starts.append(start | {"round_trip_ms": round_trip, "slow_start": slow_start})
                                    print(f"{name}, {shape(round_trip, slow_start)}: {system}: {start['seconds']:.2f} s",
                                          file=sys.stderr)
            # What is measured stays, whatever becomes of the images to come.
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report, systems))


class Bench:
    """One image."""

    def __init__(self, name, server, work):
        self.name, self.server, self.work = name, server, work
        self.ready = ready_when(name)
        self.traces = work / f"traces-{name}"

    def prepare(self, directory):
        """Push the image as it was built, converted, and optimized by the trace of one start."""
        built = self.server.push(f"oci:{directory / self.name}:latest", f"{self.name}:built")
        with self.node("teach", "record", rest=0) as node:
            lazy = self.server.reference(f"{self.name}:lazy")
            node("convert", built, lazy)
            until_ready(node.command("run", lazy), self.ready)
            wait_until(lambda: any((node.root / "traces").glob("*")), 30, f"trace of {self.name}")
            node("optimize", lazy, self.server.reference(f"{self.name}:optimized"))
            shutil.copytree(node.root / "traces", self.traces)
        # The registry runs already: what it answers is not read from its disk while a reader waits.
        for system in LAZY:
            self.start(system, self.server.address)

    @contextmanager
    def filled(self):
        """A node that has all of the image, for warm starts."""
        with self.node("warm", "nothing", rest=0) as self.warm_node:
            self.warm_node("prefetch", "--wait", self.server.reference(f"{self.name}:lazy"))
            yield

    def warm(self):
        """One start when everything is local and the daemon runs."""
        drop_caches()
        with self.server.counted() as traffic:
            seconds = until_ready(self.warm_node.command("run", self.server.reference(f"{self.name}:lazy")), self.ready)
        return self.result("warm", seconds, traffic)

    def start(self, system, far):
        """One start, cold but for `warm`, with the registry behind `far`."""
        if system == "warm":
            return self.warm()
        if system == "pull":
            return self.pull(far)
        ahead = "learn" if system == "optimized" else system
        with self.node("start", ahead, rest=0) as node:
            if system == "learn":
                shutil.copytree(self.traces, node.root / "traces")
            tag = "optimized" if system == "optimized" else "lazy"
            drop_caches()
            with self.server.counted() as traffic:
                seconds = until_ready(node.command("run", f"{far}/{self.name}:{tag}"), self.ready)
                # What is on the way was asked for.
                time.sleep(0.3)
        return self.result(system, seconds, traffic)

    def pull(self, far):
        bundle, layout = self.work / "pull/bundle", f"{self.work}/pull/layout:latest"
        bundle.parent.mkdir()
        drop_caches()
        with self.server.counted() as traffic:
            began = time.monotonic()
            run("skopeo", "--insecure-policy", "copy", "--src-tls-verify=false",
                f"docker://{far}/{self.name}:built", f"oci:{layout}")
            run("umoci", "unpack", "--image", layout, bundle)
            config = json.loads((bundle / "config.json").read_text())
            config["process"]["terminal"] = False
            config["process"]["capabilities"] = dict.fromkeys(["bounding", "effective", "permitted"], CAPABILITIES)
            namespaces = config["linux"]["namespaces"]
            config["linux"]["namespaces"] = [n for n in namespaces if n["type"] != "network"]
            (bundle / "config.json").write_text(json.dumps(config))
            runc = ["runc", "--root", self.work / "pull/runc"]
            pulled = time.monotonic() - began
            try:
                seconds = pulled + until_ready([*runc, "run", "--bundle", bundle, "lazuli-prefetch"], self.ready)
            finally:
                run("sh", "-c", f"{' '.join(map(str, runc))} delete --force lazuli-prefetch 2>/dev/null || true")
        shutil.rmtree(self.work / "pull")
        return self.result("pull", seconds, traffic)

    def result(self, system, seconds, traffic):
        return {"image": self.name, "system": system, "seconds": seconds,
                "requests": traffic.requests, "bytes": traffic.bytes}

    def node(self, name, ahead, rest):
        """A node with a running daemon, which is gone with everything that it has after the
        block."""
        return Node(self.work / name, f'[prefetch]\nahead = "{ahead}"\nrest_bytes_per_second = {rest}\n')


def shape(round_trip, slow_start):
    """What a distance is called."""
    return f"{round_trip:.0f} ms" + (", slow start" if slow_start and round_trip else "")


def summary(report, systems):
    """One table per distance, one line per image."""
    text = []
    shapes = {(start["round_trip_ms"], not start["slow_start"]) for start in report["starts"]}
    for round_trip, delay_only in sorted(shapes):
        rows = []
        for image in dict.fromkeys(start["image"] for start in report["starts"]):
            mine = {system: [start for start in report["starts"] if (start["image"], start["system"],
                    start["round_trip_ms"], not start["slow_start"]) == (image, system, round_trip, delay_only)]
                    for system in systems}
            seconds = {system: median([start["seconds"] for start in mine[system]]) for system in systems}
            hot = median([start["bytes"] for start in mine["learn"]])
            bound = seconds["warm"] + hot * 8 / (report["megabits"] * 1e6) + ROUND_TRIPS * round_trip / 1000
            requests = [str(round(median([start["requests"] for start in mine[system]]))) for system in LAZY]
            volume = [megabytes(median([start["bytes"] for start in mine[system]])) for system in systems[1:]]
            rows.append([image, *(f"{seconds[system]:.2f}" for system in systems), f"{bound:.2f}",
                         f"{seconds['learn'] / bound:.2f}", " · ".join(requests), " · ".join(volume)])
        header = ["image", *systems, "bound", "learn ÷ bound", "requests", "MB"]
        title = f"{shape(round_trip, not delay_only)}, {report['megabits']} Mbit/s: seconds to ready"
        text.append(f"\n{title}\n\n{table(header, rows)}")
    return "\n".join(text)
