"""Measures processor time and memory of a conversion, and of comparable tools.

All start from one tree, the corpus image unpacked, and write to the same disk; nothing but the
input is cached. In each round every tool runs once, one after the other, in an order that changes:

  lazuli tar           lazuli convert tar:TREE.tar
  lazuli tar batched   the same with --batch 256
  nydus-image tar      nydus-image create -t tar-rafs, with the features that lazuli writes
  nydus-image batched  the same with --batch-size, where nydus-image has that (2.3 and later; see --batching-nydus)
  mkfs.erofs           from the directory, uncompressed
  mkfs.erofs lz4       from the directory, -zlz4
  mkfs.erofs lz4hc     from the directory, -zlz4hc
  mkfs.erofs zstd      from the directory, -zzstd, where mkfs.erofs has that (1.8 and later)
  gzip                 of the tar, as docker build does it
  lazuli layers        lazuli convert of the image itself: gzip'd layers, which have to be inflated too

Prints medians of CPU seconds (user and system, of all threads), wall seconds, the largest resident
set, and the size of what was written. mkfs.erofs computes no digests.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lab import REPOSITORY, CommandFailed, corpus, drop_caches, fair_scheduling, median, need_root, run, scratch, table
from lab.lazuli import Lazuli

from .results import write


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", action="append", help="an image of the corpus (python and gcc)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/build.json")
    parser.add_argument("--nydus", type=Path, default=os.environ.get("LAZULI_NYDUS", REPOSITORY / "target/nydus/bin"),
                        help="directory of upstream's programs (LAZULI_NYDUS, or what the Makefile builds)")
    parser.add_argument("--batching-nydus", type=Path, help="directory of a nydus-image that makes batches, if the other does not")
    args = parser.parse_args(argv)
    need_root()

    names = args.image or ["python", "gcc"]
    directory = corpus(*names)
    builds = []
    with fair_scheduling():
        for name in names:
            with scratch("build") as work:
                mine = measure(directory / name, args, work)
            builds += [{"image": name, **build} for build in mine]
            print(f"\n{name}: median of {args.rounds} conversions\n\n{summary(mine)}", flush=True)
    write(args.json, "build", argv, builds=builds)


def measure(source, args, work):
    """Unpack an image, and convert it again and again; return a list of what each conversion
    took."""
    run("umoci", "unpack", "--image", f"{source}:latest", work / "bundle")
    tree, tar, out = work / "bundle/rootfs", work / "tree.tar", work / "out"
    run("tar", "--format=posix", "--sort=name", "--numeric-owner", "--xattrs", "--xattrs-include=*",
        "--pax-option=delete=atime,delete=ctime", "-C", tree, "-cf", tar, ".")
    lazuli = Lazuli(work / "root")
    plain, batching = (path.resolve() / "nydus-image" for path in (args.nydus, args.batching_nydus or args.nydus))
    nydus = ["create", "--log-level", "warn", "--type", "tar-rafs", "--features", "blob-toc",
             "--blob-dir", out, "--bootstrap", out / "bootstrap", tar]
    convert = ["convert", f"tar:{tar}", f"oci:{out}/layout:latest"]
    erofs = ["mkfs.erofs", "--quiet"]
    # What each reads, and how.
    tools = {
        "lazuli tar": (tar, lazuli.command(*convert)),
        "lazuli tar batched": (tar, lazuli.command(*convert, "--batch", "256")),
        "nydus-image tar": (tar, [plain, *nydus]),
        "nydus-image batched": (tar, [batching, *nydus, "--batch-size", "0x40000"]),
        "mkfs.erofs": (tree, [*erofs, out / "image", tree]),
        "mkfs.erofs lz4": (tree, [*erofs, "-zlz4", out / "image", tree]),
        "mkfs.erofs lz4hc": (tree, [*erofs, "-zlz4hc", out / "image", tree]),
        "mkfs.erofs zstd": (tree, [*erofs, "-zzstd", out / "image", tree]),
        "gzip": (tar, ["sh", "-c", f"exec gzip -c {tar} >{out}/tar.gz"]),
        "lazuli layers": (source, lazuli.command("convert", f"oci:{source}:latest", f"oci:{out}/layout:latest")),
    }
    if "--batch-size" not in capabilities(batching, "create", "--help"):
        del tools["nydus-image batched"]
    if "zstd" not in capabilities("mkfs.erofs", "--help"):
        del tools["mkfs.erofs zstd"]
    builds = []
    for turn in range(args.rounds):
        order = list(tools)
        for tool in order[turn % len(order):] + order[:turn % len(order)]:
            path, command = tools[tool]
            out.mkdir()
            warm(path)
            builds.append({"round": turn, "tool": tool, **usage(list(map(str, command))), "mb": size(out) / 1e6})
            shutil.rmtree(out)
            print(f"round {turn + 1}: {tool}: {builds[-1]['cpu_s']:.2f} s CPU", file=sys.stderr)
    return builds


def capabilities(*command):
    """All that a command prints, whatever it returns."""
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return found.stdout


def warm(path):
    """Have all of it in the page cache and nothing else, and the disk quiet: the memory is as full
    for every tool."""
    drop_caches()
    subprocess.run(["find", path, "-type", "f", "-exec", "cat", "{}", "+"], stdout=subprocess.DEVNULL, check=True)


def usage(command):
    """Run a command; return its CPU and wall seconds and its largest resident set."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise CommandFailed(command, process.returncode, errors)
    # The kernel counts the largest resident set in KiB.
    return {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": time.monotonic() - began, "rss_mib": used.ru_maxrss / 1024}


def size(directory):
    """Bytes of all files below a directory, holes not counted."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def summary(builds):
    """One line per tool, in the order they ran."""
    rows = []
    for tool in dict.fromkeys(build["tool"] for build in builds):
        mine = {key: median([build[key] for build in builds if build["tool"] == tool])
                for key in ("cpu_s", "wall_s", "rss_mib", "mb")}
        rows.append([tool, f"{mine['cpu_s']:.1f}", f"{mine['wall_s']:.1f}", f"{mine['rss_mib']:.0f}", f"{mine['mb']:.1f}"])
    return table(["tool", "CPU s", "wall s", "peak MiB", "MB written"], rows)
