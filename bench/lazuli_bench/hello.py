"""Push, pull, create and ready of many images, for every way to bring them that is here.

usage: lazuli-bench hello [--rounds N] [--shapes 0,1,2] [--contenders NAME,...] [--secure] [--json FILE] [IMAGE...]

Each image of the corpus is pushed to an empty registry in the form that each contender wants. Then it is pulled and
started in a pod through containerd's CRI service, with its own command, until it is ready: a line, an answer over HTTP, or
its exit. Each start has a node of its own, whose daemons run and which has nothing of the image; no page is cached. Its
containerd has pulled before, a small image from another registry: its first connection with TLS reads the machine's root
certificates, which it then keeps for as long as it runs. Contenders take turns, in an order that changes from round to round.

The registry is on loopback, or behind a proxy on which every byte takes half a round trip, all share a bandwidth, and each
new connection begins with a window of ten segments that doubles with every round trip, as TCP's:

  loopback            as it is
  20 ms, 1 Gbit/s     another region's registry
  50 ms, 100 Mbit/s   another continent's

Images are pushed once, over the second of these. `warm` is the same start once more where all is local and cached,
`local` where all is local and no page is cached. Processor seconds are those of containerd and the snapshotter's
processes, from the pull to ready.

The bound is what no node undercuts: a warm start, the fewest bytes that any lazy contender fetched, at full bandwidth, and
the protocol's round trips: connection, manifest, metadata and data; with --secure also TLS, a refusal and a token. If busybox
is measured on loopback too, it includes containerd's pull of it there (1 MB).
"""

import argparse
import contextlib
import json
import resource
import shutil
import sys
import time
import tomllib
from pathlib import Path

from lab import REPOSITORY, CommandFailed, corpus, drop_caches, fair_scheduling, megabytes, need_root, run, scratch
from lab.coldstart import image_size
from lab.containerd import PAUSE, containerd_version, cri_program, node
from lab.link import link
from lab.registry import remote_registry
from lab.oci import Layout, layers_size
from lab.workload import ready_when

from . import results
from .contenders import ABSENT, contenders
from .report import markdown
from .report.hello import Hello

SHAPES = [{"name": "loopback", "round_trip_ms": 0, "megabits": None},
          {"name": "20 ms, 1 Gbit/s", "round_trip_ms": 20, "megabits": 1000},
          {"name": "50 ms, 100 Mbit/s", "round_trip_ms": 50, "megabits": 100}]
PUSHED_OVER = SHAPES[1]
PULLED_BEFORE = "pause:1"
SHAPER = "a proxy on loopback (wire of the test kit) with delay, bandwidth, handshakes and slow start; the kernel has no netem"
IMAGES = ["busybox", "debian-slim", "debian", "hello-world", "redis", "memcached", "mariadb", "postgres", "lua",
          "python-slim", "python", "perl", "ruby", "php", "golang", "gcc", "openjdk", "nginx", "httpd", "haproxy", "jetty",
          "flask", "django", "node", "express", "registry", "prometheus"]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("images", nargs="*", default=IMAGES, metavar="IMAGE", help="of bench/corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="0,1,2", help="their numbers, separated by commas")
    parser.add_argument("--contenders", help="names, separated by commas, besides overlayfs; all that are here, without variants, unless named")
    parser.add_argument("--secure", action="store_true", help="the registry has TLS and a token service")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/hello.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(*args.images)
    here, missing = choose(args.contenders)
    shapes = [SHAPES[int(number)] for number in args.shapes.split(",")]
    report = {"containerd": containerd_version(), "shaper": SHAPER, "rounds": args.rounds, "shapes": shapes,
              "round_trips": 7 if args.secure else 4,
              "contenders": [{"name": c.name, "title": c.title, "version": c.version()} for c in here],
              "missing": missing, "images": {}, "pushes": [], "starts": [], "warm": [], "local": []}
    with scratch("hello") as work, fair_scheduling():
        for name in args.images:
            with remote_registry(work / "registry", args.secure) as server:
                Image(name, directory / name, server, work, here, report).measure(shapes, args.rounds)
            shutil.rmtree(work / "registry")
            # What is measured stays, whatever becomes of the images to come.
            results.write(args.json, "hello", argv, **report)
    print(markdown.tables(Hello(report)))


def choose(names):
    """The contenders that are wanted and here, and why others are not."""
    named = ["overlayfs", *names.split(",")] if names else []
    wanted = [c for c in contenders() if (c.name in named if names else not c.is_variant)]
    reasons = {contender.title: contender.missing() for contender in wanted}
    here = [contender for contender in wanted if not reasons[contender.title]]
    return here, ABSENT | {title: reason for title, reason in reasons.items() if reason}


class Image:
    """One image of the corpus."""

    def __init__(self, name, layout, server, work, here, report):
        self.name, self.layout, self.server, self.work = name, layout, server, work
        self.contenders, self.report = here, report
        self.ready, self.pushed = ready_when(name), {}

    def measure(self, shapes, rounds):
        archive = self.work / "pause.tar"
        run(cri_program(), "pause", PAUSE, archive)
        self.server.push(f"oci-archive:{archive}", PULLED_BEFORE)
        self.report["images"][self.name] = {"category": category(self.name), "bytes": layers_size(Layout(self.layout).manifest())}
        usable = [contender for contender in self.contenders if self.push(contender)]
        self.warm(rounds)
        for shape in shapes:
            with far(self.server, shape) as address:
                for turn in range(rounds):
                    for contender in usable[turn % len(usable):] + usable[:turn % len(usable)]:
                        self.start(contender, shape, address, turn)

    def push(self, contender):
        """Have what a contender pulls in the registry; whether that went well."""
        form = contender.form
        if form not in self.pushed:
            self.pushed[form] = self.push_form(contender)
        self.report["pushes"].append({"image": self.name, "contender": contender.name} | self.pushed[form])
        return "error" not in self.pushed[form]

    def push_form(self, contender):
        """Make images for a contender, and push them to a repository of their own."""
        work, push, name = self.work / "push", {"shape": PUSHED_OVER["name"]}, f"{contender.form}:{self.name}"
        work.mkdir()
        drop_caches()
        try:
            with far(self.server, PUSHED_OVER) as address:
                before, began = used_by_children(), time.monotonic()
                contender.publish(f"{self.layout}:latest", f"{address}/{name}", work)
                push |= {"seconds": time.monotonic() - began, "cpu_s": used_by_children() - before}
            push |= {"bytes": image_size(self.server.reference(name))}
            said = f"{push['seconds']:.2f} s, {megabytes(push['bytes'])} MB"
        except CommandFailed as error:
            push |= {"error": results.error_text(error)}
            said = str(error)
        shutil.rmtree(work)
        print(f"{self.name}: push, {contender.title}: {said}", file=sys.stderr)
        return push

    def warm(self, rounds):
        """The start when everything is local and unpacked, cached and not."""
        plain = self.contenders[0]
        reference = self.server.reference(f"{plain.form}:{self.name}")
        with node(self.work / "node", plain) as this:
            this.start(self.server, reference, self.ready)
            for _ in range(rounds):
                for what in ("warm", "local"):
                    if what == "local":
                        drop_caches()
                    began = time.time()
                    _, done = this.run(reference, self.ready)
                    self.report[what].append({"image": self.name, "seconds": done - began})

    def start(self, contender, shape, address, turn):
        """One cold start."""
        start = {"image": self.name, "contender": contender.name, "shape": shape["name"], "round": turn + 1}
        try:
            with node(self.work / "node", contender) as this:
                this.cri("pull", f"{self.server.named(self.server.other)}/{PULLED_BEFORE}")
                found = this.start(self.server, f"{address}/{contender.form}:{self.name}", self.ready)
            start |= {"pull_s": found.pulled, "create_s": found.created, "ready_s": found.ready, "requests": found.requests,
                      "bytes": found.bytes, "cpu_s": found.cpu, "rss_bytes": found.rss}
            said = f"ready after {found.ready:.2f} s, {megabytes(found.bytes)} MB"
        except (CommandFailed, TimeoutError) as error:
            start |= {"error": results.error_text(error)}
            said = str(error)
        self.report["starts"].append(start)
        print(f"{self.name}: {shape['name']}, {contender.title}: {said}", file=sys.stderr)


@contextlib.contextmanager
def far(server, shape):
    """The registry's address at this distance."""
    if shape["megabits"] is None:
        yield server.named(server.address)
        return
    with link(server.address, shape["round_trip_ms"], shape["megabits"]) as address:
        yield server.named(address)


def category(name):
    """An image's, of the corpus."""
    with open(REPOSITORY / "bench/corpus/workloads.toml", "rb") as file:
        workloads = tomllib.load(file)["workload"]
    workload = workloads[name]
    return workload.get("category") or category(workload["like"])


def used_by_children():
    """Processor seconds of all programs that were run so far, with those that they have run."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
