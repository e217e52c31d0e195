"""Measures the cost of a policy: starts of signed images beside the same ones unsigned.

Each image of the corpus is converted once and starts with its own command until it is ready, on a
node that has nothing of it, with the registry behind a wire on which connections start slowly, as
TCP's do. The images have one manifest, so they are the same image for the registry, each under a
name of its own:

  unsigned   no policy
  own        signed by `lazuli convert --sign`
  cosign2    signed by cosign with --new-bundle-format=false: a tag beside the image
  cosign3    signed by cosign 3: a bundle that refers to the image

With `--indexed` the images are the corpus's own, with an index that the same key states; `own` is
left out. Nodes without a policy then use any index.

They take turns. `round trips` is the median of what each round's start took longer than that
round's unsigned one, divided by the round trip. `again` is the same node's second start, with what
the first one has kept. Each node has started another image from the registry before: it knows then
that this registry has no referrers API, for an hour.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from lab import REPOSITORY, corpus, drop_caches, fair_scheduling, machine, median, megabytes, need_root, run, scratch, table
from lab.cosign import Cosign
from lab.lazuli import Node
from lab.link import link
from lab.registry import remote_registry
from lab.workload import ready_when, until_ready

IMAGES = ["lua", "redis", "nginx"]
BEFORE = "busybox"
SYSTEMS = ["unsigned", "own", "cosign2", "cosign3"]
MEGABITS = 1000


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", default=IMAGES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-trip", type=float, default=50, help="milliseconds to the registry [50]")
    parser.add_argument("--indexed", action="store_true", help="ordinary images with an index")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/signed.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(BEFORE, *args.images)
    systems = [system for system in SYSTEMS if not args.indexed or system != "own"]
    report = {"machine": machine(), "round_trip_ms": args.round_trip, "megabits": MEGABITS, "starts": []}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with scratch("signed") as work, remote_registry(work / "registry") as server, fair_scheduling():
        with link(server.address, args.round_trip, MEGABITS) as far:
            signer = Signer(work, far, args.indexed)
            for name in dict.fromkeys([BEFORE, *args.images]):
                built = server.push(f"oci:{directory / name}:latest", f"{name}:built")
                for system in systems:
                    signer.publish(system, built, f"{far}/{system}/{name}")
            for name in args.images:
                for turn in range(args.rounds):
                    for system in systems[turn % len(systems):] + systems[:turn % len(systems)]:
                        for start in starts(work, signer, server, system, f"{far}/{system}", name):
                            report["starts"].append({"image": name, "system": system, "round": turn} | start)
                            print(json.dumps(report["starts"][-1]), file=sys.stderr, flush=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report))


class Signer:
    """cosign, and a policy that asks for its signatures."""

    def __init__(self, work, registry, indexed):
        self.work, self.indexed, self.cosign, self.policy = work, indexed, Cosign(work), work / "policy.toml"
        statements = f'statements = ["{self.cosign.public}"]\n' if indexed else ""
        self.policy.write_text(f'default = "accept"\n[images."{registry}"]\nkeys = ["{self.cosign.public}"]\n{statements}')
        self.open = '[index]\ntrust = "repository"\n' if indexed else ""

    def publish(self, system, built, name):
        """Store the lazy image as NAME:lazy, signed as `system` does it."""
        with Node(self.work / "publish", "") as node:
            sign = ["--sign", self.cosign.private] if system == "own" else []
            if self.indexed:
                node("copy", built, f"{name}:lazy")
                run(*node.command("index", f"{name}:lazy", "--sign", self.cosign.private), env=self.cosign.environment)
            else:
                run(*node.command("convert", *sign, built, f"{name}:lazy"), env=self.cosign.environment)
            if system.startswith("cosign"):
                self.cosign.sign(f"{name}:lazy", bundle=system == "cosign3")


def starts(work, signer, server, system, place, name):
    """The first and the second start on a node that has nothing of the image."""
    policy = "" if system == "unsigned" else f'policy = "{signer.policy}"\n'
    policy += signer.open if system == "unsigned" else ""
    with Node(work / "start", f"{policy}[prefetch]\nrest_bytes_per_second = 0\n") as node:
        until_ready(node.command("run", f"{place}/{BEFORE}:lazy"), ready_when(BEFORE))
        for what in "first", "again":
            drop_caches()
            with server.counted() as traffic:
                seconds = until_ready(node.command("run", f"{place}/{name}:lazy"), ready_when(name))
                # What is on the way was asked for.
                time.sleep(0.3)
            yield {"start": what, "seconds": round(seconds, 4), "requests": traffic.requests, "bytes": traffic.bytes}


def summary(report):
    """One line per image and kind of signature."""
    rows = []
    for image in dict.fromkeys(start["image"] for start in report["starts"]):
        def mine(system, what, image=image):
            return [start for start in report["starts"] if (start["image"], start["system"], start["start"]) == (image, system, what)]

        for system in dict.fromkeys(start["system"] for start in report["starts"]):
            row = [image, system]
            for what in "first", "again":
                signed, unsigned = mine(system, what), mine("unsigned", what)
                more = median([(a["seconds"] - b["seconds"]) * 1000 for a, b in zip(signed, unsigned)])
                row += [f"{median([start['seconds'] for start in signed]):.3f}", f"{more / report['round_trip_ms']:.1f}",
                        str(round(median([start["requests"] for start in signed])))]
            rows.append([*row, megabytes(median([start["bytes"] for start in mine(system, "first")]))])
    header = ["image", "signature", "first: s", "round trips", "requests", "again: s", "round trips", "requests", "MB"]
    return table(header, rows)
