"""Extrapolates from a few measured nodes to a fleet of thousands.

Reads the result of `lazuli-bench fleet`. Three ways to bring an image are modelled, each node with
processors and a link of its own:

  pull     N × image ÷ registry link, then unpack and run
  lazuli   N × what a start reads ÷ registry link, then run
  p2p      one copy ÷ registry link, handed on from node to node, then run

Assumptions of p2p: pieces of 4 MiB travel on as soon as they have arrived; a node feeds so many
others as the scheduler names it to (4), so the last node is log4(N) steps away from the first one,
and each step takes one piece over its parents' links; each start registers a few downloads, which
cost the scheduler processor time, shared by its processors; nodes begin at the same moment; nothing
fails.

What is taken from the measurement: seconds of one node alone, bytes, and processor seconds of each
program. The same model, but with the processors of the machine that was measured on shared by all
nodes, is compared with the measured starts first.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from lab import REPOSITORY, median, table

PIECE = 4 << 20
CHILDREN = 4  # candidateParentLimit of the scheduler
MODELLED = ("pull", "lazuli", "p2p")


@dataclass
class Way:
    """What one node costs."""

    seconds: float  # alone, until it is ready
    registry: float  # bytes of the registry
    cpu: float  # processor seconds of a node's programs
    scheduler: float  # and of the scheduler


@dataclass
class Site:
    """Where the nodes are."""

    registry: float  # bytes per second of the registry's link
    node: float  # and of each node's
    cpus: float  # processors of each node; of all of them together if they share
    shared: bool
    schedulers: float = 4  # processors of the scheduler


def ready(name, way, nodes, site):
    """Seconds until the last node is ready."""
    # Alone, a node waits for the registry's link and for its own processor, one after the other at
    # worst.
    contention = way.cpu * (nodes - 1) / site.cpus if site.shared else 0
    if name in ("pull", "lazuli"):
        queue = way.registry * (nodes - 1) / site.registry
        return way.seconds + max(queue, contention)
    steps = max(0, math.log(nodes, CHILDREN))
    spread = steps * PIECE * CHILDREN / site.node
    booking = way.scheduler * (nodes - 1) / (site.cpus if site.shared else site.schedulers)
    return way.seconds + max(spread + booking, contention)


def egress(name, way, nodes):
    """Bytes that the registry sends."""
    return way.registry * (1 if name == "p2p" else nodes)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", type=Path, default=REPOSITORY / "target/bench/fleet.json", help="the result of `lazuli-bench fleet`")
    parser.add_argument("--nodes", default="100,1000,10000")
    parser.add_argument("--registry-gigabits", type=float, default=10, help="of the registry's link [10]")
    parser.add_argument("--node-gigabits", type=float, default=10, help="of each node's link [10]")
    args = parser.parse_args(argv)
    report = json.loads(args.fleet.read_text())
    ways = {name: alone(report, name) for name in MODELLED}
    here = Site(report["megabits"] * 125000, math.inf, report["machine"]["cpus"], shared=True)
    print(check(report, ways, here))
    there = Site(args.registry_gigabits * 125e6, args.node_gigabits * 125e6, 4, shared=False)
    print()
    print(predict(report, ways, there, [int(nodes) for nodes in args.nodes.split(",")]))


def alone(report, name):
    """What one node has cost."""
    mine = [start for start in report["starts"] if start["way"] == name and start["nodes"] == 1]
    if not mine:
        sys.exit(f"the fleet has no start of one node with {name}")
    spent = lambda program: median([start["seconds"].get(program, 0) for start in mine])
    # One start costs it no more than a tick of the kernel's clock, so it is counted over many.
    most = max((start for start in report["starts"] if start["way"] == name), key=lambda start: start["nodes"])
    booking = most["seconds"].get("scheduler", 0) / most["nodes"]
    return Way(median([start["ready"][-1] for start in mine]), median([start["registry_bytes"] for start in mine]),
               spent("lazuli") + spent("dfdaemon") + spent("run"), booking)


def check(report, ways, site):
    """The model beside what was measured."""
    rows = []
    for name, way in ways.items():
        for nodes in sorted({start["nodes"] for start in report["starts"]} - {1}):
            mine = [start for start in report["starts"] if start["way"] == name and start["nodes"] == nodes]
            last, sent = median([start["ready"][-1] for start in mine]), median([start["registry_bytes"] for start in mine])
            model = ready(name, way, nodes, site)
            rows.append([f"{nodes} × {name}", f"{last:.2f}", f"{model:.2f}", f"{model / last:.2f}", f"{sent / 1e6:.1f}",
                         f"{egress(name, way, nodes) / 1e6:.1f}"])
    return table(["nodes", "last ready s", "model s", "÷", "registry MB", "model MB"], rows)


def predict(report, ways, site, numbers):
    """What many nodes would take."""
    # With the registry's link of the measurement a start alone has waited for the bytes; here the
    # link is another.
    measured = report["megabits"] * 125000
    rows = []
    for name, way in ways.items():
        here = Way(way.seconds - way.registry / measured + way.registry / site.registry, way.registry, way.cpu, way.scheduler)
        for nodes in numbers:
            rows.append([f"{nodes} × {name}", f"{ready(name, here, nodes, site):.1f}", f"{egress(name, here, nodes) / 1e9:.2f}"])
    return table(["nodes", "last ready s", "registry GB"], rows)
