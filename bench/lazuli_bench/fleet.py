"""Measures time to ready and the registry's traffic when many nodes start one image at once.

Each node is a network namespace with its own Lazuli daemon and an empty cache. A bridge connects
the nodes, and one shared link connects them to the registry. The image is started in these ways:

  pull        skopeo copy, umoci unpack, runc run
  lazuli      lazuli run, each node by itself; the image was converted with --trace-run
  lazuli-raw  the same with an untraced image, whose hot chunks are scattered
  p2p         as lazuli, with dfdaemon on each node and a scheduler, configured as in dist/dragonfly
  p2p-raw     as lazuli-raw, with Dragonfly

Dragonfly's daemons are restarted with empty storage each time. Rounds alternate between the ways.
Each round ends with a warm start on all nodes, which shows the cost of sharing this machine's
processors.
"""

import argparse
import math
import shutil
import sys
from pathlib import Path

from lab import REPOSITORY, corpus, dragonfly, fair_scheduling, median, megabytes, need_root, network, run, scratch, table
from lab.fleet import PORT, fleet, site, start
from lab.lazuli import Lazuli, lazuli
from lab.network import HUB

from . import results

IMAGE = "python-slim"
PROGRAM = ["python3", "-c", "import json, sys; print(json.dumps({'hello from': sys.version.split()[0]}))"]
EXPECT = b"hello from"
WAYS = {"pull": "built", "lazuli": "traced", "lazuli-raw": "lazy", "p2p": "traced", "p2p-raw": "lazy"}
NODES = "1,2,4,8,16"


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default=NODES, help=f"how many, separated by commas [{NODES}]")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-trip", type=float, default=20, help="milliseconds to the registry [20]")
    parser.add_argument("--megabits", type=int, default=100, help="per second, of the registry's link [100]")
    parser.add_argument("--cpus", type=float, help="processors of each node [they share those of the machine]")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/fleet.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(IMAGE)
    network.enter()
    ways, herds = args.ways.split(","), []
    if any(way.startswith("p2p") for way in ways):
        dragonfly.binaries()
    with scratch("fleet") as work, site(work / "registry", args.round_trip, args.megabits) as server, fair_scheduling():
        prepare(server, work, f"oci:{directory / IMAGE}:latest")
        for turn in range(args.rounds):
            for nodes in map(int, args.nodes.split(",")):
                for way in ways[turn % len(ways):] + ways[:turn % len(ways)]:
                    herd = one(way, nodes, server, work, cpus=args.cpus)
                    herds.append({"way": way, "nodes": nodes, "round": turn + 1, **vars(herd)})
                    print(f"round {turn + 1}, {nodes} nodes, {way}: ready after {herd.ready[0]:.2f} to {herd.ready[-1]:.2f} s,"
                          f" {megabytes(herd.registry_bytes)} MB of the registry", file=sys.stderr, flush=True)
            results.write(args.json, "fleet", argv, tools=tools(ways), image=IMAGE, round_trip_ms=args.round_trip, megabits=args.megabits, cpus=args.cpus, starts=herds)
    print(summary(herds))


def tools(ways):
    """What the ways are made of, with versions."""
    programs = {"lazuli": Lazuli.BINARY, "runc": "runc"}
    if "pull" in ways:
        programs |= {"skopeo": "skopeo", "umoci": "umoci"}
    if any(way.startswith("p2p") for way in ways):
        programs["dfdaemon"] = dragonfly.binaries() / "dfdaemon"
    return {name: run(program, "--version").decode().splitlines()[0] for name, program in programs.items()}


def prepare(server, work, built):
    """Push the image in its forms."""
    reference = server.push(built, f"{IMAGE}:built")
    with lazuli(work / "convert") as instance:
        instance("convert", reference, server.reference(f"{IMAGE}:lazy"))
        instance("convert", reference, server.reference(f"{IMAGE}:traced"), "--trace-run", *PROGRAM)


def one(way, nodes, server, work, **changes):
    """Start the image on all nodes in one way; `changes` are of the nodes, see `fleet`."""
    there = work / "fleet"
    with fleet(there, nodes, p2p=way.startswith("p2p"), socket=way.startswith("p2p"), **changes) as (lazulis, daemons):
        reference = f"{HUB}:{PORT}/{IMAGE}:{WAYS[way]}"
        herd = start(server, lazulis, daemons, reference, PROGRAM, EXPECT, pull=there / "pull" if way == "pull" else None)
        if way != "pull":
            herd.again = start(server, lazulis, daemons, reference, PROGRAM, EXPECT).ready
    shutil.rmtree(there)
    return herd


def summary(herds):
    """One line for each way and number of nodes: medians over rounds."""
    cells = {}
    for herd in herds:
        cells.setdefault((herd["nodes"], herd["way"]), []).append(herd)
    rows = []
    for (nodes, way), mine in cells.items():
        alone = cells.get((1, way), mine)
        p50 = median([median(herd["ready"]) for herd in mine])
        last = median([herd["ready"][-1] for herd in mine])
        sent = median([herd["registry_bytes"] for herd in mine])
        peers = median([herd["traffic"].get("REMOTE_PEER", 0) for herd in mine])
        again = median([(herd.get("again") or [math.nan])[-1] for herd in mine])
        rows.append([f"{nodes} × {way}", f"{p50:.2f}", f"{last:.2f}", f"{last / median([h['ready'][-1] for h in alone]):.2f}",
                     megabytes(sent), f"{sent / median([h['registry_bytes'] for h in alone]):.2f}", megabytes(peers), f"{again:.2f}"])
    header = ["nodes", "ready p50 s", "last s", "× one node", "registry MB", "× one node", "peers MB", "last s, again"]
    return table(header, rows)
