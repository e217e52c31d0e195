"""Measures how fast one big file is read that is not here yet.

An image has one file that does not compress, like the weights of a model. Its registry is behind a
wire of the given bandwidth and round trip as of `lazuli-bench prefetch`, or on loopback. Each round
reads all of it on a new node, in each of these ways in turn:

  curl     the stored blob by one connection, to /dev/null: what the link and this machine give
  read     1 MiB after the other, as dd does
  map      the same by page faults, in order
  tensors  pieces of 4 to 64 MiB by page faults: in order inside, the pieces in random order
  eight    eight processes take 1 MiB each in turn

The configuration is the default one. Seconds count from the first byte that is read; the mount is
there.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

from lab import REPOSITORY, drop_caches, fair_scheduling, machine, median, need_root, run, scratch, table
from lab.lazuli import Node
from lab.link import link
from lab.registry import remote_registry

WAYS = ["curl", "read", "map", "tensors", "eight"]
NETWORKS = "0x0,1000x20,2500x5,2500x20"
STEP = 1 << 20
PROCESSES = 8


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", default=NETWORKS, help="MEGABITSxMILLISECONDS, separated by commas; 0x0 is loopback")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/big.json")
    args = parser.parse_args(argv)
    need_root()
    ways, reads = args.ways.split(","), []
    report = {"machine": machine(), "mebibytes": args.mebibytes, "reads": reads}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with scratch("big") as work, remote_registry(work / "registry") as server, fair_scheduling():
        blob = prepare(server, work, args.mebibytes << 20)
        for network in args.networks.split(","):
            megabits, milliseconds = map(int, network.split("x"))
            for turn in range(args.rounds):
                for way in ways[turn % len(ways):] + ways[:turn % len(ways)]:
                    with near_end(server.address, milliseconds, megabits) as far:
                        read = one(way, far, blob, work)
                    reads.append(read | {"way": way, "network": network})
                    print(f"{network}, {way}: {read['seconds']:.2f} s, {read['cpu_seconds']:.2f} CPU s", file=sys.stderr)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report, ways))


def near_end(address, milliseconds, megabits):
    return link(address, milliseconds, megabits) if megabits else contextlib.nullcontext(address)


def prepare(server, work, size):
    """Push the image; return the path of its blob."""
    source = work / "source"
    source.mkdir()
    with open(source / "weights", "wb") as file:
        for _ in range(size // STEP):
            file.write(os.urandom(STEP))
    with Node(work / "prepare", "") as node:
        image = server.reference("big:lazy")
        node("convert", f"dir:{source}", image)
        said = json.loads(node("inspect", image, "--json"))
    (source / "weights").unlink()
    [blob] = said["blobs"]
    digest = blob["id"]
    return f"/v2/big/blobs/sha256:{digest.removeprefix('sha256:')}"


def one(way, far, blob, work):
    if way == "curl":
        drop_caches()
        began, before = time.monotonic(), children()
        run("curl", "-sS", "--fail", "-o", "/dev/null", f"http://{far}{blob}")
        return {"seconds": time.monotonic() - began, "cpu_seconds": children() - before}
    with Node(work / "node", "") as node, node.mounted(f"{far}/big:lazy", work / "node/big", "auto") as at:
        drop_caches()
        pid = node.processes()[1]
        began, before = time.monotonic(), cpu(pid)
        READERS[way](at / "weights")
        return {"seconds": time.monotonic() - began, "cpu_seconds": cpu(pid) - before}


def children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu(pid):
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read(path):
    run("dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none")


# Each touches one byte of every page, in a process of its own.
MAP = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
    for piece in sys.argv[2:]:
        start, end = map(int, piece.split("-"))
        for at in range(start, end, 4096):
            pages[at]
"""


def map_in_order(path):
    run(sys.executable, "-c", MAP, path, f"0-{path.stat().st_size}")


def map_by_tensor(path):
    sizes, pieces, at, size = random.Random(1), [], 0, path.stat().st_size
    while at < size:
        end = min(size, at + (sizes.randrange(4, 64) << 20))
        pieces.append(f"{at}-{end}")
        at = end
    sizes.shuffle(pieces)
    run(sys.executable, "-c", MAP, path, *pieces)


def read_in_turn(path):
    """As loaders that share a shard do."""
    size = path.stat().st_size
    command = "import os, sys\nfile = os.open(sys.argv[1], os.O_RDONLY)\nfor at in range(int(sys.argv[2]), " \
        "int(sys.argv[3]), int(sys.argv[4])):\n    os.pread(file, 1 << 20, at)\n"
    readers = [subprocess.Popen([sys.executable, "-c", command, path, str(number * STEP), str(size), str(PROCESSES * STEP)])
               for number in range(PROCESSES)]
    failed = [reader for reader in readers if reader.wait()]
    if failed:
        raise RuntimeError(f"{len(failed)} readers failed")


READERS = {"read": read, "map": map_in_order, "tensors": map_by_tensor, "eight": read_in_turn}


def summary(report, ways):
    size = report["mebibytes"] << 20
    lazy = [way for way in ways if way != "curl"]
    header = ["Mbit/s x ms", *(f"{way} s" for way in ways), *(f"curl / {way}" for way in lazy if "curl" in ways), *(f"{way} CPU s/GB" for way in ways[:2])]
    rows = []
    for network in dict.fromkeys(read["network"] for read in report["reads"]):
        def of(way, key):
            return median(read[key] for read in report["reads"] if (read["network"], read["way"]) == (network, way))
        seconds = {way: of(way, "seconds") for way in ways}
        ratios = [f"{seconds['curl'] / seconds[way]:.2f}" for way in lazy] if "curl" in ways else []
        used = [f"{of(way, 'cpu_seconds') / size * 1e9:.2f}" for way in ways[:2]]
        rows.append([network, *(f"{seconds[way]:.2f}" for way in ways), *ratios, *used])
    return table(header, rows)
