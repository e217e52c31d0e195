"""Reading through a lazuli mount whose data is all local, beside the same tree on ext4.

The tree, a big file and many small ones, lies on the disk's own file system; lazuli converts it, and mounts it
with both drivers. After one pass over everything the image is complete: the fanotify driver takes
no more part. In each round every test runs once on every side, caches dropped before each:

  seq read, rand read    fio, psync, 4 KiB, buffered
  find, ls -lR           of the whole tree

Prints medians, and the speed as a ratio to the disk's file system: the median of the rounds' ratios.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from lab import (REPOSITORY, drop_caches, fair_scheduling, machine, median, need_root, run, scratch, table)
from lab.coldstart import DRIVERS
from lab.lazuli import lazuli

NATIVE = "native"
SIDES = (NATIVE, *DRIVERS)
FILES_PER_DIRECTORY = 300


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=512, help="MiB of the big file")
    parser.add_argument("--files", type=int, default=30_000, help="small files")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/fs.json")
    args = parser.parse_args(argv)
    need_root()

    with scratch("fs") as work, lazuli(work / "root") as instance, fair_scheduling():
        tree = make_tree(work / "tree", args.size, args.files)
        image = f"oci:{work / 'layout'}:latest"
        instance("convert", f"dir:{tree}", image)
        with instance.mounted(image, work / "fanotify", "fanotify") as fanotify, \
             instance.mounted(image, work / "fuse", "fuse") as fuse:
            for mount in (fanotify, fuse):
                read_all(mount)
            before = complete(instance, fanotify)
            sides = dict(zip(SIDES, (tree, fanotify, fuse)))
            results = measure(sides, args.rounds)
            events = complete(instance, fanotify) - before

    report = {"machine": machine(), "big_file_mib": args.size, "small_files": args.files,
              "fanotify_events": events, "rounds": results}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{args.size} MiB file and {args.files} small files, {args.rounds} rounds; "
          f"fanotify events meanwhile: {events}\n\n{summary(results)}")


def make_tree(tree, size, files):
    """The big file does not compress; the small ones are 0.5 to 8 KiB, as in a package."""
    chance = random.Random(1)
    tree.mkdir()
    with open(tree / "big", "wb") as big:
        for _ in range(size):
            big.write(chance.randbytes(1 << 20))
    for number in range(files):
        directory = tree / f"d{number // FILES_PER_DIRECTORY:04}"
        directory.mkdir(exist_ok=True)
        (directory / f"file-{number}").write_bytes(chance.randbytes(chance.randrange(512, 8192)))
    return tree


def read_all(directory):
    """Read every file once."""
    subprocess.run(["sh", "-c", 'find "$1" -type f -exec cat {} + >/dev/null', "read", directory], check=True)


def complete(instance, mountpoint):
    """The events of a mount so far, which must have all of its chunks."""
    status = instance.status(mountpoint)
    if status["chunks_ready"] != status["chunks_total"]:
        raise RuntimeError(f"{mountpoint}: {status['chunks_ready']} of {status['chunks_total']} chunks after reading all")
    return status["events"]


def measure(sides, rounds):
    """A list of rounds: per test and side, the speed (MiB/s, or passes per second)."""
    results = []
    for turn in range(rounds):
        seconds = {}
        for test, speed in TESTS.items():
            order = SIDES[turn % len(SIDES):] + SIDES[:turn % len(SIDES)]
            seconds[test] = {side: measure_one(speed, sides[side], turn) for side in order}
        results.append(seconds)
        print(f"round {turn + 1}: " + ", ".join(
            f"{test} " + "/".join(f"{values[side] / values[NATIVE]:.2f}" for side in DRIVERS)
            for test, values in seconds.items()), file=sys.stderr)
    return results


def measure_one(speed, directory, turn):
    drop_caches()
    return speed(directory, turn)


def fio(mode, directory, seed):
    """MiB/s of 4 KiB reads of the big file; random ones read an eighth of it."""
    part = "12%" if mode == "randread" else "100%"
    output = run("fio", "--name=bench", "--readonly", f"--filename={directory / 'big'}", f"--rw={mode}", "--bs=4k",
                 "--ioengine=psync", "--invalidate=0", f"--io_size={part}", f"--randseed={seed + 1}",
                 "--output-format=json")
    return json.loads(output)["jobs"][0]["read"]["bw_bytes"] / 2**20


def walk(*command):
    """Passes per second of a command over the tree."""
    def passes(directory, _):
        began = time.monotonic()
        with open(os.devnull, "wb") as nowhere:
            subprocess.run([*command, directory], check=True, stdin=subprocess.DEVNULL, stdout=nowhere)
        return 1 / (time.monotonic() - began)
    return passes


TESTS = {
    "seq read": lambda directory, seed: fio("read", directory, seed),
    "rand read": lambda directory, seed: fio("randread", directory, seed),
    "find": walk("find"),
    "ls -lR": walk("ls", "-lR"),
}


def summary(results):
    """One line per test."""
    rows = []
    for test in TESTS:
        unit = "MiB/s" if "read" in test else "1/s"
        speeds = [f"{median([r[test][side] for r in results]):.2f}" for side in SIDES]
        ratios = [f"{median([r[test][side] / r[test][NATIVE] for r in results]):.2f}" for side in DRIVERS]
        rows.append([f"{test} ({unit})", *speeds, *ratios])
    return table(["test", *SIDES, *(f"{driver} ÷ native" for driver in DRIVERS)], rows)
