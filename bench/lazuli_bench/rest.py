"""Measures how soon a node needs no registry for an image, and the waits of readers meanwhile.

Two images have files that do not compress: one a big file, the other many files of 256 KiB, as much
as a reader fetches at once by default. Their registry is behind a wire as of `lazuli-bench
prefetch`. Each round, on new nodes with the default configuration but for `[cache] keep_free`:

  rest    the big image is mounted, and one byte is read: seconds until nothing is missing
  16      the same with `rest_bytes_per_second` of 16 MiB
  alone   a reader reads the small files, each once, in random order, with pauses of 20 ms;
          nothing is fetched ahead
  beside  the same while the rest of both images comes

Only reads that waited for the registry count: those that took half of a round trip or more.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

from lab import REPOSITORY, drop_caches, fair_scheduling, machine, median, need_root, scratch, table
from lab.lazuli import Node
from lab.link import link
from lab.registry import remote_registry

ARMS = ["rest", "16", "alone", "beside"]
NETWORKS = "1000x20,2500x5,100x50"
SIZE, FILES, READS = 256 << 10, 1200, 300
PAUSE = 0.02
CACHE = '[cache]\nkeep_free = "2%"\n[prefetch]\n'


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the big file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", default=NETWORKS, help="MEGABITSxMILLISECONDS, separated by commas")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/rest.json")
    args = parser.parse_args(argv)
    need_root()
    arms, seen = args.arms.split(","), []
    report = {"machine": machine(), "mebibytes": args.mebibytes, "read_bytes": SIZE, "seen": seen}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with scratch("rest") as work, remote_registry(work / "registry") as server, fair_scheduling():
        prepare(server, work, args.mebibytes)
        for network in args.networks.split(","):
            megabits, milliseconds = map(int, network.split("x"))
            with link(server.address, milliseconds, megabits) as far:
                for turn in range(args.rounds):
                    for arm in arms[turn % len(arms):] + arms[:turn % len(arms)]:
                        result = whole(arm, far, work) if arm in ("rest", "16") else reads(arm, far, work, milliseconds)
                        seen.append({"network": network, "arm": arm, "round": turn} | result)
                        print(network, arm, result.get("seconds", "read"), file=sys.stderr)
            args.json.write_text(json.dumps(report) + "\n")
    print(summary(report, arms))


def prepare(server, work, mebibytes):
    """Push both images."""
    big, small = work / "big", work / "small"
    big.mkdir()
    small.mkdir()
    with open(big / "weights", "wb") as file:
        for _ in range(mebibytes):
            file.write(os.urandom(1 << 20))
    for number in range(FILES):
        (small / str(number)).write_bytes(os.urandom(SIZE))
    with Node(work / "prepare", "") as node:
        for source in (big, small):
            node("convert", f"dir:{source}", server.reference(f"{source.name}:lazy"))
    (big / "weights").unlink()


def whole(arm, far, work):
    """Start the big image, and wait until all of it is here."""
    config = CACHE + (f"rest_bytes_per_second = {16 << 20}\n" if arm == "16" else "")
    with Node(work / "node", config) as node, node.mounted(f"{far}/big:lazy", work / "node/big", "auto") as at:
        began = time.monotonic()
        with open(at / "weights", "rb") as file:
            file.read(1)
        while node.status(at)["bytes_missing"]:
            time.sleep(0.1)
        return {"seconds": time.monotonic() - began}


def reads(arm, far, work, round_trip):
    """Milliseconds of the reads that waited for the registry."""
    config = CACHE + 'ahead = "nothing"\n' + ("rest_bytes_per_second = 0\n" if arm == "alone" else "")
    took, order = [], random.sample(range(FILES), FILES)
    with Node(work / "node", config) as node, node.mounted(f"{far}/small:lazy", work / "node/small", "auto") as at:
        with node.mounted(f"{far}/big:lazy", work / "node/big", "auto"):
            time.sleep(1)
            drop_caches()
            for number in order:
                began = time.monotonic()
                with open(at / str(number), "rb", buffering=0) as file:
                    while file.read(SIZE):
                        pass
                milliseconds = 1000 * (time.monotonic() - began)
                if milliseconds >= round_trip / 2:
                    took.append(round(milliseconds, 2))
                if len(took) == READS:
                    break
                time.sleep(PAUSE)
    return {"milliseconds": took}


def summary(report, arms):
    """One line per network and arm."""
    rows = []
    for network in dict.fromkeys(one["network"] for one in report["seen"]):
        for arm in arms:
            mine = [one for one in report["seen"] if (one["network"], one["arm"]) == (network, arm)]
            if "seconds" in mine[0]:
                rows.append([network, arm, f"{median([one['seconds'] for one in mine]):.1f}", "", "", ""])
                continue
            waited = [statistics.quantiles(one["milliseconds"], n=100) for one in mine]
            cells = [f"{median([one[at - 1] for one in waited]):.1f}" for at in (50, 90, 99)]
            rows.append([network, arm, "", *cells])
    return table(["Mbit/s x ms", "arm", "complete s", "p50 ms", "p90 ms", "p99 ms"], rows)
