"""Measures many images that are pulled, or pushed, at the same time.

usage: lazuli-bench scale [--counts N,...] [--contenders NAME,...] [--json FILE]

Images of the corpus are pushed to one registry by as many clients at once, and pulled by one node,
through containerd's CRI service, over 20 ms and 1 Gbit/s, as in `lazuli-bench hello`. Each time
registry and node have nothing of them. Seconds are those until the last one has arrived: a pull of
a lazy image ends when containers can be made of it.
"""

import argparse
import concurrent.futures
import shutil
import sys
import time
from pathlib import Path

from lab import REPOSITORY, CommandFailed, corpus, drop_caches, fair_scheduling, need_root, scratch, table
from lab.containerd import containerd_version, node
from lab.registry import remote_registry

from . import results
from .hello import PUSHED_OVER, choose, far

# In the order in which they join: of all sizes from the beginning.
IMAGES = ["python-slim", "nginx", "redis", "lua", "postgres", "debian", "memcached", "httpd", "php", "haproxy", "registry",
          "prometheus", "busybox", "hello-world", "debian-slim", "mariadb", "python", "perl", "ruby", "jetty", "openjdk",
          "flask", "django", "node", "express", "golang", "gcc", "nginx-next", "redis-next", "flask-next", "django-next",
          "express-next"]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("--counts", default="1,2,4,8,16,32", help="numbers of images, separated by commas")
    parser.add_argument("--contenders", help="names, separated by commas, besides overlayfs; all that are here, without variants, unless named")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/scale.json")
    args = parser.parse_args(argv)
    need_root()
    counts = list(map(int, args.counts.split(",")))
    directory = corpus(*IMAGES[:max(counts)])
    here, missing = choose(args.contenders)
    points = []
    report = {"containerd": containerd_version(), "images": IMAGES[:max(counts)], "missing": missing,
              "contenders": [{"name": c.name, "title": c.title, "version": c.version()} for c in here], "points": points}
    with scratch("scale") as work, fair_scheduling():
        for count in counts:
            for contender in here:
                points += measure(contender, IMAGES[:count], directory, work)
                for point in points[-2:]:
                    print(f"{point['operation']} of {count}, {contender.title}: {point.get('error') or point['seconds']}", file=sys.stderr)
            # What is measured stays, whatever becomes of the counts to come.
            results.write(args.json, "scale", argv, **report)
    print(summary(points, counts))


def measure(contender, images, directory, work):
    """All of them, pushed and then pulled."""
    points = [{"contender": contender.name, "operation": operation, "parallel": len(images)} for operation in ("push", "pull")]
    try:
        with remote_registry(work / "registry") as server, far(server, PUSHED_OVER) as address:
            def push(name):
                scratch_of_it = work / f"push-{name}"
                scratch_of_it.mkdir()
                try:
                    contender.publish(f"{directory / name}:latest", f"{address}/{name}:1", scratch_of_it)
                finally:
                    shutil.rmtree(scratch_of_it)

            points[0]["seconds"] = at_once(push, images)
            with node(work / "node", contender) as this:
                points[1]["seconds"] = at_once(lambda name: this.cri("pull", f"{address}/{name}:1"), images)
    except CommandFailed as error:
        for point in points:
            if "seconds" not in point:
                point["error"] = results.error_text(error)
    shutil.rmtree(work / "registry")
    return points


def at_once(task, images):
    """Do something for all images at the same time; return the seconds until all of it is done."""
    drop_caches()
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(images)) as pool:
        list(pool.map(task, images))
    return time.monotonic() - began


def summary(points, counts):
    """One line for each contender and operation."""
    found = {(point["contender"], point["operation"], point["parallel"]): point.get("seconds") for point in points}
    rows = []
    for contender, operation in dict.fromkeys((point["contender"], point["operation"]) for point in points):
        cells = [found[contender, operation, count] for count in counts]
        rows.append([f"{operation}, {contender}", *("–" if cell is None else f"{cell:.1f}" for cell in cells)])
    return table(["seconds for images at once", *map(str, counts)], rows)
