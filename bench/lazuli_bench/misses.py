"""Measures the latency of a miss, by the node that has the bytes.

Two nodes read files of one image, one at a time. Each file is an incompressible chunk of 256 KiB,
the default size of a request, in a Dragonfly piece (4 MiB) of its own. Prefetching is off, and the
registry is behind a link with delay. The first node reads bytes that no node has. Then it fetches
the whole image, and the second node reads the same files from that peer, each followed by a
neighbour that its own dfdaemon holds by then.

  direct  no Dragonfly
  proxy   with dfdaemon's proxy
  socket  with dfdaemon's proxy and Unix socket

`--set` replaces the settings of dist/dragonfly:

  default  those of scheduler and dfdaemon, and a separate seed peer
  seed     the recommended ones, but the only seed peer is a separate node
  patient  the scheduler looks for a peer every 50 ms
  hasty    the scheduler looks for a peer once
"""

import argparse
import random
import shutil
import statistics
import sys
import time
from pathlib import Path

from lab import REPOSITORY, drop_caches, dragonfly, fair_scheduling, need_root, network, scratch, table
from lab.fleet import PORT, fleet, site
from lab.lazuli import lazuli
from lab.network import HUB

from . import results

SIZE, PIECE = 256 << 10, 4 << 20
IMAGE = "misses"
QUIET = '[prefetch]\nahead = "nothing"\nrest_bytes_per_second = 0\n'
SETTINGS = {
    "recommended": {},
    "default": {"scheduler": {"retryInterval": "500ms"}, "daemon": {"enable": "false"}, "seeds": 1},
    "seed": {"daemon": {"enable": "false"}, "seeds": 1},
    "patient": {"scheduler": {"retryInterval": "50ms"}},
    "hasty": {"scheduler": {"retryBackToSourceLimit": 1}},
}
WAYS = ["direct", "proxy", "socket"]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="recommended", help=f"of {', '.join(SETTINGS)}, separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--reads", type=int, default=50, help="misses of each kind [50]")
    parser.add_argument("--round-trip", type=float, default=20, help="milliseconds to the registry [20]")
    parser.add_argument("--megabits", type=int, default=1000, help="per second, of the registry's link [1000]")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/misses.json")
    args = parser.parse_args(argv)
    need_root()
    network.enter()
    if args.ways != "direct":
        dragonfly.binaries()
    rows = []
    with scratch("misses") as work, site(work / "registry", args.round_trip, args.megabits) as server, fair_scheduling():
        prepare(server, work, args.reads)
        for way in args.ways.split(","):
            for name in args.set.split(",") if way != "direct" else ["-"]:
                rows.append({"way": way, "settings": name} | one(way, SETTINGS.get(name, {}), server, work, args.reads))
                print(line(rows[-1]), file=sys.stderr, flush=True)
                results.write(args.json, "misses", argv, round_trip_ms=args.round_trip, megabits=args.megabits, read_bytes=SIZE, rows=rows)
    print(table(["way", "settings", "no node has it p50", "p90 ms", "a peer has it p50", "p90 ms", "dfdaemon has it p50", "p90 ms",
                 "registry × 1st", "× 2nd"], [line(row) for row in rows]))


def line(row):
    """A row of the table."""
    times = [f"{percentile(row[who], percent):.1f}" if row[who] else "-" for who in ("nobody", "peer", "own") for percent in (50, 90)]
    wanted = len(row["nobody"]) * SIZE
    return [row["way"], row["settings"], *times, *(f"{row[count] / wanted:.2f}" for count in ("first_bytes", "second_bytes"))]


def percentile(values, percent):
    return statistics.quantiles(values, n=100)[percent - 1]


def prepare(server, work, reads):
    """An image whose blob has one file to read in each piece, and its neighbours."""
    files = work / "files"
    files.mkdir()
    for number in range((reads + 1) * (PIECE // SIZE)):
        (files / f"{number:05}").write_bytes(random.randbytes(SIZE))
    with lazuli(work / "convert") as instance:
        instance("convert", f"dir:{files}", server.reference(f"{IMAGE}:1"))
    shutil.rmtree(files)


def one(way, settings, server, work, reads):
    """The waits of both nodes, in milliseconds, and what the registry sent each of them."""
    there = work / "fleet"
    order = random.sample(range(reads), reads)
    more = QUIET + "[fetch]\namplify_bytes = 0\n"
    with fleet(there, 2, p2p=way != "direct", more=more, socket=way == "socket", **settings) as (lazulis, _):
        mounts = []
        for number, node in enumerate(lazulis):
            mounts.append(there / f"mnt{number}")
            mounts[-1].mkdir()
            node("mount", f"{HUB}:{PORT}/{IMAGE}:1", mounts[-1])
        drop_caches()
        with server.counted() as first:
            nobody = [wait(mounts[0], piece, 1) for piece in order]
        peer, own = [], []
        if way != "direct":
            lazulis[0]("prefetch", "--wait", f"{HUB}:{PORT}/{IMAGE}:1")
        with server.counted() as second:
            for piece in order if way != "direct" else []:
                peer.append(wait(mounts[1], piece, 1))
                own.append(wait(mounts[1], piece, 5))
        for mount, node in zip(mounts, lazulis):
            node("umount", mount)
    shutil.rmtree(there)
    return {"nobody": nobody, "peer": peer, "own": own, "first_bytes": first.bytes, "second_bytes": second.bytes}


def wait(mount, piece, beside):
    """Read a file of a piece; milliseconds."""
    path = mount / f"{piece * (PIECE // SIZE) + beside:05}"
    began = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while file.read(SIZE):
            pass
    return round(1000 * (time.monotonic() - began), 2)
