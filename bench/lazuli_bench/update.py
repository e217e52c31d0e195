"""Measures pushes and starts of an image's next version, in bytes and seconds.

usage: lazuli-bench update [--rounds N] [--contenders NAME,...] [--json FILE] [FROM...]

  flask     one source file of an application was edited
  django    a package was updated
  express   a package below an unchanged application was updated
  nginx     the base was rebuilt with security updates, and everything on top of it
  redis     the same

The version before is in the registry and has run on the node. Both are reached over 20 ms and 1
Gbit/s, as in `lazuli-bench hello`. Pushed are the blobs that the version before does not have;
pulled is what the registry sent.

Before that, for Lazuli: all of each update, whatever a start reads of it, beside the chunks that
are in no file of the version before (`lazuli diff`).
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lab import REPOSITORY, CommandFailed, corpus, drop_caches, fair_scheduling, median, megabytes, need_root, run
from lab import scratch, table
from lab.containerd import containerd_version, node
from lab.lazuli import lazuli
from lab.registry import remote_registry
from lab.workload import ready_when

from . import results
from .hello import PUSHED_OVER, choose, far

# The annotation of layers that hold chunks.
DATA = "containerd.io/snapshot/nydus-blob"
# What is counted of an update, in bytes.
CHANGE = ["changed_bytes", "pushed_chunk_bytes", "pushed_metadata_bytes", "fetched_bytes"]
IMAGES = ["flask", "django", "express", "nginx", "redis"]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument("images", nargs="*", default=IMAGES, metavar="FROM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", help="names, separated by commas, besides overlayfs; all that are here, without variants, unless named")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/update.json")
    args = parser.parse_args(argv)
    need_root()
    directory = corpus(*args.images, *map(following, args.images))
    here, missing = choose(args.contenders)
    updates = []
    with scratch("update") as work, fair_scheduling():
        changes = [whole(name, directory, work) for name in args.images]
        for name in args.images:
            for turn in range(args.rounds):
                for contender in here[turn % len(here):] + here[:turn % len(here)]:
                    updates.append(one(contender, name, directory, work))
                    said = updates[-1].get("error") or f"{updates[-1]['ready_s']:.2f} s"
                    print(f"{name}, {contender.title}: {said}", file=sys.stderr)
    results.write(args.json, "update", argv, changes=changes, containerd=containerd_version(), rounds=args.rounds, missing=missing,
                  contenders=[{"name": c.name, "title": c.title, "version": c.version()} for c in here], updates=updates)
    print(summary(updates))
    print()
    print(table(["update", "kB of new chunks", "chunks pushed", "metadata pushed", "fetched"],
                [[change["from"], *(f"{change[field] / 1000:,.1f}" for field in CHANGE)] for change in changes]))


def following(name):
    """The version after an image of the corpus."""
    return f"{name}-next"


def one(contender, name, directory, work):
    """One update, with a registry and a node of its own."""
    update = {"from": name, "to": following(name), "contender": contender.name}
    try:
        with remote_registry(work / "registry") as server, far(server, PUSHED_OVER) as address:
            before = push(contender, directory / name, f"{address}/app:1", work)
            began = time.monotonic()
            after = push(contender, directory / following(name), f"{address}/app:2", work)
            update |= {"push_s": time.monotonic() - began,
                       "pushed_bytes": sum(after[digest] for digest in after.keys() - before.keys())}
            with node(work / "node", contender) as this:
                this.start(server, f"{address}/app:1", ready_when(name))
                start = this.start(server, f"{address}/app:2", ready_when(following(name)))
        update |= {"pulled_bytes": start.bytes, "requests": start.requests, "ready_s": start.ready}
    except (CommandFailed, TimeoutError) as error:
        update |= {"error": results.error_text(error)}
    shutil.rmtree(work / "registry")
    return update


def whole(name, directory, work):
    """The bytes of one update that Lazuli pushes and a node that has all of the version before
    fetches, to have all of it."""
    with remote_registry(work / "registry") as server, lazuli(work / "root") as instance:
        before, after = server.reference("app:1"), server.reference("app:2")
        instance("convert", f"oci:{directory / name}:latest", before)
        had = blobs(before)
        instance("prefetch", "--wait", before)
        instance("convert", f"oci:{directory / following(name)}:latest", after)
        with server.counted() as fetched:
            instance("prefetch", "--wait", after)
        has = blobs(after)
        # Not `run`: it ends with 1 where images differ.
        diff = json.loads(subprocess.run(instance.command("diff", "--json", before, after), stdout=subprocess.PIPE).stdout)
    for part in ("registry", "root"):
        shutil.rmtree(work / part)
    new = {digest: blob for digest, blob in has.items() if digest not in had}
    chunks = sum(blob["size"] for blob in new.values() if DATA in blob.get("annotations", {}))
    metadata = sum(blob["size"] for blob in new.values()) - chunks
    counts = [diff["chunks"]["only_b"]["stored_bytes"], chunks, metadata, fetched.bytes]
    return {"from": name, "to": following(name)} | dict(zip(CHANGE, counts, strict=True))


def push(contender, layout, reference, work):
    """Push a version; return the sizes of its blobs by their digests."""
    work.joinpath("push").mkdir()
    drop_caches()
    contender.publish(f"{layout}:latest", reference, work / "push")
    shutil.rmtree(work / "push")
    return {digest: blob["size"] for digest, blob in blobs(reference).items()}


def blobs(reference):
    """The descriptors of an image's blobs by their digests."""
    manifest = json.loads(run("skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{reference}"))
    return {blob["digest"]: blob for blob in [manifest["config"], *manifest["layers"]]}


def summary(updates):
    """One line for each update and contender."""
    rows = []
    for key in dict.fromkeys((update["from"], update["contender"]) for update in updates):
        mine = [update for update in updates if (update["from"], update["contender"]) == key and "error" not in update]
        if not mine:
            rows.append([*key, *"–" * 5])
            continue
        values = {field: median([update[field] for update in mine])
                  for field in ("pushed_bytes", "push_s", "pulled_bytes", "requests", "ready_s")}
        rows.append([*key, megabytes(values["pushed_bytes"]), f"{values['push_s']:.2f}", megabytes(values["pulled_bytes"]),
                     round(values["requests"]), f"{values['ready_s']:.2f}"])
    return table(["update", "contender", "MB pushed", "push s", "MB pulled", "requests", "ready s"], rows)
