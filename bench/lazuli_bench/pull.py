"""Measures time and processor time until a whole image is on a node.

gcc, or IMAGE, is in a registry on loopback, as it was built and as lazuli converts it. Each round
fetches it once with each system, in turn, to a node that has nothing of it and whose daemon runs;
no page is cached.

  lazuli        lazuli prefetch --wait, which returns when everything is here, checked, and on the disk
  ctr           ctr image pull: download, then unpack for the overlayfs snapshotter
  ctr, unpigz   the same, with unpigz where containerd finds it (package pigz)
  CRI, unpigz   a pull of containerd's CRI service, as Kubernetes does it, which unpacks while it downloads

Processor time is that of the daemon's processes, their children and the client, without registry
and wire. containerd leaves what it has unpacked to the page cache; `on disk` is the time when a
sync after that has ended, too. At 0 ms the registry is next door; else it is behind a wire of 1
Gbit/s, as of `lazuli-bench prefetch`.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from lab import CommandFailed, REPOSITORY, corpus, drop_caches, fair_scheduling, machine, median, megabytes, need_root
from lab import scratch, table, used
from lab.coldstart import image_size
from lab.containerd import cri_program, containerd_version, node
from lab.lazuli import Node, lazuli
from lab.link import link
from lab.registry import remote_registry

from .contenders.overlayfs import Overlayfs

BIG = "gcc"
MEGABITS = 1000
SYSTEMS = ["lazuli", "ctr", "ctr, unpigz", "CRI, unpigz"]
QUIET = '[prefetch]\nahead = "nothing"\nrest_bytes_per_second = 0\n'


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default=BIG)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-trips", default="0,20", help="milliseconds, separated by commas")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/pull.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(args.image)
    pulls = []
    with scratch("pull") as work, remote_registry(work / "registry") as server, fair_scheduling():
        built = server.push(f"oci:{directory / args.image}:latest", f"{args.image}:built")
        converted = server.reference(f"{args.image}:lazuli")
        with lazuli(work / "convert") as instance:
            instance("convert", built, converted)
        sizes = {"built": image_size(built), "lazuli": image_size(converted)}
        for round_trip in map(float, args.round_trips.split(",")):
            with far(server, round_trip) as address:
                for turn in range(args.rounds):
                    for system in SYSTEMS[turn % len(SYSTEMS):] + SYSTEMS[:turn % len(SYSTEMS)]:
                        pull = {"system": system, "round_trip_ms": round_trip, "load": os.getloadavg()[0]}
                        with server.counted() as traffic:
                            pull |= one(system, f"{address}/{args.image}", work / "node")
                        pulls.append(pull | {"requests": traffic.requests, "bytes": traffic.bytes})
                        print(f"{round_trip:.0f} ms: {system}: {pull['seconds']:.1f} s, on disk {pull['on_disk']:.1f} s, "
                              f"CPU {pull['cpu']:.1f} s", file=sys.stderr)
    report = {"machine": machine(), "containerd": containerd_version(), "image": args.image, "image_bytes": sizes,
              "megabits": MEGABITS, "pulls": pulls}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report))


def far(server, round_trip):
    """The registry at this distance."""
    return link(server.address, round_trip, MEGABITS) if round_trip else contextlib.nullcontext(server.address)


def one(system, image, work):
    """One pull to a node of its own."""
    if system == "lazuli":
        with Node(work, QUIET) as this:
            return measure(this.command("prefetch", "--wait", f"{image}:lazuli"), this.processes())
    client, _, helper = system.partition(", ")
    with node(work, Overlayfs(), **({} if helper else {"CONTAINERD_DISABLE_PIGZ": "1"})) as this:
        command = [cri_program(), this.socket, "pull"]
        if client == "ctr":
            command = ["ctr", "--address", this.socket, "image", "pull", "--plain-http", "--snapshotter", "overlayfs"]
        return measure([*command, f"{image}:built"], [this.process.pid])


def measure(command, daemon):
    """Run a client; return its time, the time until the disk has everything, and what it and the
    daemon have used."""
    drop_caches()
    before, began = used(daemon), time.monotonic()
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, cpu = time.monotonic() - began, used(daemon) - before + usage.ru_utime + usage.ru_stime
    if process.returncode:
        raise CommandFailed(command, process.returncode, output)
    os.sync()
    return {"seconds": seconds, "on_disk": time.monotonic() - began, "cpu": cpu}


def summary(report):
    """One line per distance and system. Ratios are medians of those of the rounds."""
    rows = []
    for round_trip in sorted({pull["round_trip_ms"] for pull in report["pulls"]}):
        mine = {system: [pull for pull in report["pulls"] if (pull["system"], pull["round_trip_ms"]) == (system, round_trip)]
                for system in SYSTEMS}
        for system, pulls in mine.items():
            def ratio(what):
                return f"{median([slow[what] / fast[what] for slow, fast in zip(pulls, mine['lazuli'])]):.2f} ×"
            seconds = [pull["seconds"] for pull in pulls]
            rows.append([f"{round_trip:.0f} ms, {system}", f"{median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})",
                         ratio("seconds"), f"{median([pull['on_disk'] for pull in pulls]):.1f}", ratio("on_disk"),
                         f"{median([pull['cpu'] for pull in pulls]):.1f}", ratio("cpu"),
                         round(median([pull["requests"] for pull in pulls])),
                         megabytes(median([pull["bytes"] for pull in pulls]))])
    header = [report["image"], "s", "of lazuli's", "on disk s", "of lazuli's", "CPU s", "of lazuli's", "requests", "MB"]
    return table(header, rows)
