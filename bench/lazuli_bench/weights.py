"""Measures the time until a loader has a model's first tensor, and all that it wants.

A model of three safetensors files is in a registry, as the artifact that ModelPack's tools make and
as an ordinary image with a layer for each file. The registry is behind a wire of the given bandwidth
and round trip as of `lazuli-bench prefetch`, or on loopback. Each round starts a loader (safetensors
of PyPI, to NumPy arrays) on a new node, in each of these ways in turn:

  convert   the image that `lazuli convert` makes of the artifact, mounted
  index     the artifact mounted by its own name, with an index
  whole     the same, but no index counts: the node pulls the artifact, and mounts it then
  download  as an init container: all files by curl at once, their digests checked; then the loader
  pull      the ordinary image: ctr image pull, which unpacks it; then the loader

The loader wants all tensors, or every second or tenth (--shares). Seconds count from the first
command, mounts and pulls included.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import REPOSITORY, drop_caches, fair_scheduling, machine, median, megabytes, need_root, run, scratch, table
from lab.containerd import node
from lab.lazuli import Node, lazuli
from lab.oci import MEDIA, Layout
from lab.registry import remote_registry

from .big import near_end
from .contenders.overlayfs import Overlayfs

WAYS = ["convert", "index", "whole", "download", "pull"]
NETWORKS = "1000x20,2500x5,0x0"
FILES = 3
TENSOR = 16 << 20
RAW = "application/vnd.cncf.model.weight.v1.raw"
CONFIG = '[index]\ntrust = "repository"\n'
LOADER = """
import sys, time
from safetensors import safe_open
every, began, first = int(sys.argv[1]), float(sys.argv[2]), None
for path in sys.argv[3:]:
    with safe_open(path, framework="np") as file:
        for key in sorted(file.keys())[::every]:
            file.get_tensor(key)
            first = first or time.monotonic() - began
print(first, time.monotonic() - began)
"""


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="size of each of the three files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--networks", default=NETWORKS, help="MEGABITSxMILLISECONDS, separated by commas; 0x0 is loopback")
    parser.add_argument("--shares", default="100,10", help="percent of the tensors that are read, separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/weights.json")
    args = parser.parse_args(argv)
    need_root()
    ways, starts = args.ways.split(","), []
    report = {"machine": machine(), "mebibytes": args.mebibytes, "starts": starts}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with scratch("weights") as work, remote_registry(work / "registry") as server, fair_scheduling():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", work / "packages", "safetensors", "numpy")
        model = Model(server, work, args.mebibytes << 20)
        for network in args.networks.split(","):
            megabits, milliseconds = map(int, network.split("x"))
            for share in map(int, args.shares.split(",")):
                for turn in range(args.rounds):
                    for way in ways[turn % len(ways):] + ways[:turn % len(ways)]:
                        with near_end(server.address, milliseconds, megabits) as far, server.counted() as traffic:
                            first, last = START[way](model, far, 100 // share)
                        starts.append({"way": way, "network": network, "share": share, "first": first, "last": last,
                                       "bytes": traffic.bytes, "requests": traffic.requests})
                        print(f"{network}, {share} %, {way}: first {first:.2f} s, last {last:.2f} s", file=sys.stderr)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report, ways))


class Model:
    """A model in the registry, in all forms."""

    def __init__(self, server, work, size):
        self.work = work
        self.names = [f"model-{number + 1}-of-{FILES}.safetensors" for number in range(FILES)]
        artifact, image = Layout.create(work / "artifact"), Layout.create(work / "image")
        files, layers, diff_ids = [], [], []
        for name in self.names:
            path = work / name
            write(path, size // TENSOR)
            with tarfile.open(work / "tar", "w") as tar:
                tar.add(path, name)
            with open(work / "tar", "rb") as tar:
                diff_ids.append(f"sha256:{hashlib.file_digest(tar, 'sha256').hexdigest()}")
            run("gzip", "-1", "--force", work / "tar")
            layers.append(image.add_file(work / "tar.gz", f"{MEDIA}.layer.v1.tar+gzip"))
            files.append(artifact.add_file(path, RAW, annotations={"org.cncf.model.filepath": name}))
            (work / "tar.gz").unlink()
            path.unlink()
        config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
        image.add_image(config, layers)
        self.blobs = [layer["digest"] for layer in files]
        artifact.add_artifact("application/vnd.cncf.model.manifest.v1+json", files)
        server.push(f"oci:{work / 'image'}:latest", "model:image")
        with lazuli(work / "prepare") as instance:
            instance("copy", f"oci:{work / 'artifact'}:latest", server.reference("model:1"))
            instance("index", server.reference("model:1"))
            instance("convert", server.reference("model:1"), server.reference("model:volume"))

    def load(self, directory, every, began):
        """Run the loader; return when it had its first tensor, and all."""
        paths = [directory / name for name in self.names]
        said = run(sys.executable, "-c", LOADER, every, began, *paths, env=os.environ | {"PYTHONPATH": str(self.work / "packages")})
        return tuple(map(float, said.split()))

    def mounted(self, name, every, config=CONFIG):
        """Mount by lazuli, and load."""
        with Node(self.work / "node", config) as this:
            drop_caches()
            began = time.monotonic()
            with this.mounted(name, self.work / "node/model", "auto") as at:
                return self.load(at, every, began)

    def downloaded(self, far, every):
        """Download all, and load."""
        target = self.work / "downloaded"
        target.mkdir()
        drop_caches()
        began = time.monotonic()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda it: download(far, it[0], target / it[1]), zip(self.blobs, self.names)))
        times = self.load(target, every, began)
        run("rm", "-r", target)
        return times

    def pulled(self, far, every):
        """Pull the ordinary image, and load."""
        at, image = self.work / "mounted", f"{far}/model:image"
        at.mkdir(exist_ok=True)
        with node(self.work / "node", Overlayfs()) as this:
            ctr = ["ctr", "--address", this.socket, "image"]
            drop_caches()
            began = time.monotonic()
            run(*ctr, "pull", "--plain-http", "--snapshotter", "overlayfs", image)
            run(*ctr, "mount", "--snapshotter", "overlayfs", image, at)
            try:
                return self.load(at, every, began)
            finally:
                run(*ctr, "unmount", "--rm", at)


START = {
    "convert": lambda model, far, every: model.mounted(f"{far}/model:volume", every),
    "index": lambda model, far, every: model.mounted(f"{far}/model:1", every),
    "whole": lambda model, far, every: model.mounted(f"{far}/model:1", every, config=""),
    "download": Model.downloaded,
    "pull": Model.pulled,
}


def write(path, tensors):
    """A safetensors file of random bytes."""
    places = {f"tensor{number:04}": {"dtype": "U8", "shape": [TENSOR], "data_offsets": [number * TENSOR, (number + 1) * TENSOR]}
              for number in range(tensors)}
    header = json.dumps(places).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(tensors):
            file.write(os.urandom(TENSOR))


def download(far, digest, path):
    """What an init container does with one file."""
    command = f"curl -sS --fail http://{far}/v2/model/blobs/{digest} | tee {path} | sha256sum"
    said = subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, stdout=subprocess.PIPE, text=True).stdout
    if said.split()[0] != digest.removeprefix("sha256:"):
        raise RuntimeError(f"{path} has another digest")


def summary(report, ways):
    header = ["Mbit/s x ms, read", *(f"{way}: first s" for way in ways), *(f"{way}: last s" for way in ways), *(f"{way} MB" for way in ways)]
    rows = []
    for network, share in dict.fromkeys((start["network"], start["share"]) for start in report["starts"]):
        def of(way, key):
            return median([start[key] for start in report["starts"] if (start["network"], start["share"], start["way"]) == (network, share, way)])
        rows.append([f"{network}, {share} %", *(f"{of(way, 'first'):.2f}" for way in ways), *(f"{of(way, 'last'):.2f}" for way in ways),
                     *(megabytes(of(way, "bytes")) for way in ways)])
    return table(header, rows)
