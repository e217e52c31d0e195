"""Measures a reader's waits while Dragonfly fails, and the time until it is used again.

Two nodes with Dragonfly, as in `lazuli-bench misses`: the first has the whole image, the second
reads one file after another. A fault is injected, and the wait for the next file is recorded, with
the longest wait of five more. Then the fault is repaired, and a file is read every 0.1 s until one
comes through Dragonfly again.

  none               no fault
  dfdaemon killed    the reader's dfdaemon gets SIGKILL; repaired by a restart
  dfdaemon hangs     SIGSTOP; repaired by SIGCONT
  scheduler killed   repaired by a restart
  peer killed        the peer that has the file; not repaired
  disk full          dfdaemon's file system is full; repaired by emptying it
"""

import argparse
import contextlib
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from lab import REPOSITORY, drop_caches, dragonfly, fair_scheduling, need_root, network, run, scratch, table
from lab.fleet import PORT, fleet, site
from lab.network import HUB

from . import results
from .misses import IMAGE, QUIET, prepare, wait

FILES = 120
AFTER = 5
HEALS_WITHIN = 10


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/outages.json")
    args = parser.parse_args(argv)
    need_root()
    dragonfly.binaries()
    network.enter()
    rows = []
    with scratch("outages") as work, site(work / "registry", 20, 1000) as server, fair_scheduling():
        prepare(server, work, FILES)
        for name, fault in FAULTS.items():
            rows.append({"fault": name} | one(fault, work))
            print(rows[-1], file=sys.stderr, flush=True)
            results.write(args.json, "outages", argv, rows=rows)
    print(table(["fault", "wait before ms", "wait of the next ms", "longest of five more ms", "used again after s"],
                [[row["fault"], *(text(row[key]) for key in ("before", "next", "more", "healed"))] for row in rows]))


def text(value):
    return "-" if value is None else f"{value:.0f}" if value > 20 else f"{value:.1f}"


class Scene:
    """A node that reads, and what may fail."""

    def __init__(self, directory, lazulis, daemons, mount):
        self.directory, self.node = directory, lazulis[1]
        self.scheduler, self.peer, self.dfdaemon = daemons
        self.mount, self.pieces = mount, iter(random.sample(range(FILES), FILES))

    def read(self):
        """Milliseconds that the next file takes."""
        return wait(self.mount, next(self.pieces), 1)

    def shared(self):
        """Bytes that this node's dfdaemon has brought; None if it is not there."""
        try:
            counted = self.dfdaemon.traffic()
        except OSError:
            return None
        return counted.get("REMOTE_PEER", 0) + counted.get("BACK_TO_SOURCE", 0)


def one(fault, work):
    """One outage."""
    there = work / "fleet"
    with contextlib.ExitStack() as stack:
        lazulis, daemons = stack.enter_context(fleet(there, 2, p2p=True, more=QUIET + "[fetch]\namplify_bytes = 0\n", small_disk=fault is full))
        mount = there / "mnt"
        mount.mkdir()
        lazulis[1]("mount", f"{HUB}:{PORT}/{IMAGE}:1", mount)
        stack.callback(lazulis[1], "umount", mount)
        lazulis[0]("prefetch", "--wait", f"{HUB}:{PORT}/{IMAGE}:1")
        drop_caches()
        scene = Scene(there, lazulis, daemons, mount)
        before = max(scene.read() for _ in range(AFTER))
        mend = fault(scene)
        next_wait = scene.read()
        more = max(scene.read() for _ in range(AFTER))
        healed = None
        if mend:
            mend()
            began, brought = time.monotonic(), scene.shared()
            while time.monotonic() < began + HEALS_WITHIN:
                scene.read()
                now = scene.shared()
                if now is not None and now > (brought or 0):
                    healed = time.monotonic() - began
                    break
                brought = now if brought is None else brought
                time.sleep(0.1)
    shutil.rmtree(there)
    return {"before": before, "next": next_wait, "more": more, "healed": healed}


def none(scene):
    return None


def killed(scene):
    scene.dfdaemon.kill()
    return scene.dfdaemon.restart


def hangs(scene):
    scene.dfdaemon.process.send_signal(signal.SIGSTOP)
    return lambda: scene.dfdaemon.process.send_signal(signal.SIGCONT)


def no_scheduler(scene):
    scene.scheduler.kill()
    return scene.scheduler.restart


def no_peer(scene):
    scene.peer.kill()
    return None


def full(scene):
    disk = scene.dfdaemon.directory
    filler = disk / "filler"
    free = shutil.disk_usage(disk).free
    run("fallocate", "-l", free - (1 << 20), filler)
    return filler.unlink


FAULTS = {"none": none, "dfdaemon killed": killed, "dfdaemon hangs": hangs,
          "scheduler killed": no_scheduler, "peer killed": no_peer, "disk full": full}
