"""Makes eStargz and zstd:chunked images with the packages that nerdctl and podman use."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lab import REPOSITORY, run
from lab.oci import MEDIA, Layout

# What the program tests/compat/seekable makes, and how a manifest calls such a layer.
FORMATS = {"estargz": "gzip", "stargz-chunked": "zstd", "containers-chunked": "zstd"}

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def build(work):
    """The program that makes layers."""
    maker = work / "seekable"
    # Packages of containers/storage that need C libraries are left out.
    tags = "exclude_graphdriver_btrfs"
    run("go", "build", "-C", REPOSITORY / "tests/compat/seekable", "-tags", tags, "-o", maker, ".")
    return maker


def make(maker, form, source, work):
    """The image of a layout with every layer written anew."""
    layout, manifest = Layout.create(work / form), source.manifest(only_tag(source))
    layers, diff_ids = [], []
    for layer in manifest["layers"]:
        tar, blob = work / "layer.tar", work / "layer"
        unpack(source.blob(layer["digest"]), tar)
        annotations = json.loads(run(maker, form, tar, blob))
        layers.append(layout.add_file(blob, f"{MEDIA}.layer.v1.tar+{FORMATS[form]}", annotations=annotations))
        # eStargz has other files and another order in it.
        unpack(blob, tar)
        with open(tar, "rb") as file:
            diff_ids.append(f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}")
        blob.unlink()
    config = source.json(manifest["config"]["digest"])
    config["rootfs"]["diff_ids"] = diff_ids
    layout.add_image(config, layers)
    return layout


def only_tag(layout):
    """The tag of a layout with one image."""
    [entry] = json.loads((layout.directory / "index.json").read_text())["manifests"]
    return entry["annotations"]["org.opencontainers.image.ref.name"]


def unpack(layer, tar):
    """The tar in a layer, whatever its media type says."""
    with open(layer, "rb") as file:
        magic = file.read(4)
    program = "gzip" if magic.startswith(GZIP) else "zstd" if magic == ZSTD else "cat"
    with open(tar, "wb") as out:
        subprocess.run([program] + ["-dc"] * (program != "cat"), stdin=open(layer, "rb"), stdout=out, check=True)


def whole_seconds(lines):
    """A listing without fractions of seconds, which these formats do not have."""
    return [re.sub(rb"(\d)\.\d{9}( |$)", rb"\1\2", line, count=1) for line in lines]
