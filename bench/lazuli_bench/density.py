"""Measures time and memory of many mounts and many containers of one image.

The image is all local, and lazuli's daemon runs. For each number there is a new daemon, and then,
one after the other:

  mounts      `lazuli mount`, each at a directory of its own
  containers  `lazuli run IMAGE -- sleep`, each started when the one before it has printed a line

Memory is counted when the last one is there: of the daemon's two processes the proportional set
size, in which a page that several processes have is shared out among them (`rss_bytes`; the program
itself, with every `lazuli run`), and the machine's: by how much MemAvailable has fallen since the
daemon had nothing, with page caches dropped before both. With containers, that is also what the
kernel and `lazuli run` keep for each. What the memory that is left does not hold is not started.
"""

import argparse
import contextlib
import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

from lab import REPOSITORY, CommandFailed, corpus, drop_caches, end, fair_scheduling, median, need_root, scratch, table
from lab.lazuli import Node
from lab.workload import kill_container

from .results import write

QUIET = '[prefetch]\nahead = "nothing"\nrest_bytes_per_second = 0\n'
# A container with its `lazuli run` takes about 12 MiB. The rest of the memory is for other
# programs.
CONTAINER_BYTES, SPARE_BYTES = 16 << 20, 2 << 30


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default="debian-slim", help="an image of the corpus that has sh and sleep")
    parser.add_argument("--counts", default="1,10,100,500", help="how many, separated by commas")
    parser.add_argument("--driver", default="auto", help="lazuli's")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/density.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(args.image)
    points = []
    with scratch("density") as work, fair_scheduling():
        for kind, start in KINDS.items():
            for count in map(int, args.counts.split(",")):
                if kind == "containers" and count * CONTAINER_BYTES + SPARE_BYTES > available():
                    print(f"{count} containers: not enough memory", file=sys.stderr)
                    continue
                points.append({"kind": kind, "count": count,
                               **point(work, f"oci:{directory / args.image}:latest", start, count, args.driver)})
                print(f"{count} {kind}: {points[-1]['seconds']:.2f} s", file=sys.stderr)
    write(args.json, "density", argv, image=args.image, driver=args.driver, points=points)
    print(summary(points))


def point(work, source, start, count, driver):
    """Time and memory of so many of a kind."""
    with Node(work / "node", QUIET) as node, contextlib.ExitStack() as stack:
        image = f"oci:{work / 'node/layout'}:latest"
        node("convert", source, image)
        node("prefetch", "--wait", image)
        # A new daemon: without the memory that fetching took. It starts with the next verb.
        node.stop()
        # What a first one makes and later ones find is no part of what each one takes.
        with node.mounted(image, work / "node/first", driver):
            pass
        drop_caches()
        before, times = available(), [time.monotonic()]
        for number in range(count):
            stack.enter_context(start(node, image, number, driver))
            times.append(time.monotonic())
        drop_caches()
        sizes = [proportional_size(process) for process in node.processes()]
        return {"seconds": times[-1] - times[0], "starts": [round(done - begin, 4) for begin, done in itertools.pairwise(times)],
                "rss_bytes": dict(zip(("keeper", "worker"), sizes)), "machine_bytes": before - available()}


def mount(node, image, number, driver):
    """One more mount, until the end of the block."""
    return node.mounted(image, node.directory / f"mounts/{number}", driver)


@contextlib.contextmanager
def container(node, image, _, driver):
    """One more container, until the end of the block."""
    command = node.command("run", "--driver", driver, image, "--", "sh", "-c", "echo up; exec sleep infinity")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        line = process.stdout.readline()
        if line != b"up\n":
            raise CommandFailed(command, process.poll(), line + process.stdout.read())
        yield
    finally:
        # `sleep` is the first process of its container, which no signal ends for which it has no
        # handler, but KILL.
        kill_container(process.pid)
        end(process)


KINDS = {"mounts": mount, "containers": container}


def available():
    """What the kernel says that new programs could have, in bytes."""
    return kibibytes("/proc/meminfo", "MemAvailable")


def proportional_size(process):
    """The proportional set size of a process, in bytes."""
    return kibibytes(f"/proc/{process}/smaps_rollup", "Pss")


def kibibytes(path, name):
    """A line `NAME: NUMBER kB` of a file of the kernel's, in bytes."""
    return int(re.search(rf"^{name}: *(\d+) kB$", Path(path).read_text(), re.MULTILINE)[1]) << 10


def summary(points):
    """One line per kind and number. The last tenth of the starts says whether those before make one
    slower."""
    rows = []
    for one in points:
        each = one["count"]
        rows.append([f"{each} {one['kind']}", f"{one['seconds']:.2f}", f"{1000 * one['seconds'] / each:.1f}",
                     f"{1000 * median(one['starts'][-max(1, each // 10):]):.1f}",
                     *(f"{one['rss_bytes'][name] / 2**20:.1f}" for name in ("keeper", "worker")),
                     f"{one['machine_bytes'] / 2**20:.0f}", f"{one['machine_bytes'] / 2**20 / each:.2f}"])
    return table(["", "s", "ms each", "the last", "keeper MiB", "worker MiB", "machine MiB", "MiB each"], rows)
