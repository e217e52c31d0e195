"""Upstream's Nydus tools: nydus-image, nydusd, and its converter's packaging."""

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import struct
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from lab import CommandFailed, background, run
from lab.oci import MEDIA, Layout

BLOB_MEDIA_TYPE = "application/vnd.oci.image.layer.nydus.blob.v1"
ANNOTATION = "containerd.io/snapshot/nydus-"

# Bootstrap: the superblock at 1024 counts the devices, whose slots of 128 bytes begin at 1408, each
# with the blob's id as a tag of 64 bytes.
DEVICE_COUNT, DEVICE_SLOTS, SLOT, TAG = 1024 + 86, 1408, 128, 64

# Bootstrap of RAFS v5: the superblock, at 0, says where the blob table is and how many bytes it
# has. It has two words for each blob, the id, and a NUL between two blobs.
V5_MAGIC, V5_TABLE, V5_TABLE_SIZE, V5_WORDS = b"SFAR", 48, 64, 8


def fs_version(bootstrap):
    """The version of RAFS, 5 or 6."""
    with open(bootstrap, "rb") as file:
        return 5 if file.read(len(V5_MAGIC)) == V5_MAGIC else 6


def blob_ids(bootstrap):
    """The ids of an image's blobs, in the order of its devices."""
    with open(bootstrap, "rb") as file:
        head = file.read(DEVICE_SLOTS)
        if head.startswith(V5_MAGIC):
            offset, = struct.unpack_from("<Q", head, V5_TABLE)
            size, = struct.unpack_from("<I", head, V5_TABLE_SIZE)
            file.seek(offset)
            row = V5_WORDS + TAG
            table = file.read(size)
            return [table[at + V5_WORDS:at + row].decode() for at in range(0, size - V5_WORDS, row + 1)]
        count, = struct.unpack_from("<H", head, DEVICE_COUNT)
        return [file.read(SLOT)[:TAG].decode() for _ in range(count)]


@dataclass
class Made:
    """An image: its bootstrap, a directory with its blobs under their ids, and where the chunk
    tables of its blobs (`<id>.blob.meta`) are, if anywhere."""

    bootstrap: Path
    blobs: Path
    metas: dict = field(default_factory=dict)


# How nydus-image makes an image from a directory: (how the bootstrap travels, flags).
VARIANTS = {
    "default": ("beside", []),
    "blob-toc": ("beside", ["--features", "blob-toc"]),
    "inline-meta": ("inside", []),
    "inline-meta blob-toc": ("inside", ["--features", "blob-toc"]),
    "lz4": ("beside", ["--compressor", "lz4_block"]),
    "none sha256": ("beside", ["--compressor", "none", "--digester", "sha256"]),
    "64 KiB chunks": ("beside", ["--chunk-size", "0x10000"]),
    "v5": ("beside", ["--fs-version", "5"]),
    "v5 lz4": ("beside", ["--fs-version", "5", "--compressor", "lz4_block"]),
    "v5 none sha256": ("beside", ["--fs-version", "5", "--compressor", "none", "--digester", "sha256"]),
    "v5 64 KiB chunks": ("beside", ["--fs-version", "5", "--chunk-size", "0x10000"]),
}


class Nydus:
    """The programs below one directory."""

    def __init__(self, directory):
        self.image, self.daemon = directory / "nydus-image", directory / "nydusd"
        self.nydusify = directory / "nydusify"

    def create(self, kind, source, *flags):
        """nydus-image create."""
        return run(self.image, "create", "--log-level", "warn", "--type", kind, *flags, source)

    def check(self, bootstrap):
        """nydus-image check: superblock, tables, every inode and chunk reference."""
        run(self.image, "check", "--log-level", "warn", "--bootstrap", bootstrap)

    def make(self, variant, tree, work):
        """An image of a directory, in one of the VARIANTS."""
        work.mkdir(parents=True)
        place, flags = VARIANTS[variant]
        if place == "inside":
            return self.merge([self.inline("dir-rafs", tree, work, flags)], work)
        bootstrap, blob = work / "bootstrap", work / "blob"
        make = ["--blob", blob, "--bootstrap", bootstrap, *flags]
        self.create("dir-rafs", tree, *make)
        # What nydus-image takes for the blob's SHA-256 leaves out the digest array of a blob with a
        # ToC, so that no registry would store it under its id: tell it.
        digest = sha256(blob)
        if blob_ids(bootstrap) != [digest]:
            self.create("dir-rafs", tree, *make, "--blob-id", digest)
        blob.rename(work / digest)
        return Made(bootstrap, work)

    def convert_layers(self, layout, work):
        """An image of an OCI image, layer by layer, as upstream's converter does it."""
        work.mkdir(parents=True)
        layers = [self.inline("tar-rafs", self.plain(layout.blob(layer["digest"]), work), work,
                              ["--features", "blob-toc", "--whiteout-spec", "none"])
                  for layer in layout.manifest()["layers"]]
        return self.merge(layers, work)

    @staticmethod
    def plain(layer, work):
        """A gzip'd layer, inflated."""
        with gzip.open(layer) as source, open(work / "layer.tar", "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        return work / "layer.tar"

    def inline(self, kind, source, work, flags):
        """A blob that holds its own bootstrap, named by its digest; return the bootstrap
        extracted."""
        blob = work / "blob"
        self.create(kind, source, "--blob", blob, "--blob-inline-meta", *flags)
        name = sha256(blob)
        blob.rename(work / name)
        run(self.image, "check", "--log-level", "warn", "--blob-dir", work, work / name)
        bootstraps = work / "bootstraps"
        bootstraps.mkdir(exist_ok=True)
        # merge takes the blob's id from the name of the bootstrap's file
        return (work / f"{name}.image.boot").rename(bootstraps / name)

    def merge(self, bootstraps, work):
        """One image of layers, lowest first."""
        run(self.image, "merge", "--log-level", "warn", "--bootstrap", work / "bootstrap", *bootstraps)
        return Made(work / "bootstrap", work)

    def converted(self, program, source, work, *flags):
        """The layout that upstream's converter makes of an OCI image: `program` is
        tests/compat/converter, built."""
        layout = work / "layout"
        work.mkdir(parents=True)
        run(program, "--builder", self.image, *flags, source.directory, layout)
        return Layout(layout)

    def unwrapped(self, layout):
        """The image in a layout that a converter has made."""
        bootstrap = layout.directory / "bootstrap"
        layout.extract(layout.manifest()["layers"][-1], "image/image.boot", bootstrap)
        return Made(bootstrap, layout.directory / "blobs/sha256")

    @contextlib.contextmanager
    def mounted(self, made, directory, cache):
        """An image mounted by nydusd, with every chunk that it decodes validated. What it decoded
        stays in `cache`."""
        directory.mkdir(parents=True)
        cache.mkdir(parents=True, exist_ok=True)
        config = cache.with_suffix(".json")
        config.write_text(json.dumps({
            "version": 2, "id": "compat", "backend": {"type": "localfs", "localfs": {"dir": str(made.blobs)}},
            "cache": {"type": "filecache", "validate": True, "filecache": {"work_dir": str(cache)}},
            "rafs": {"mode": "direct", "enable_xattr": True}}))
        # --rlimit-nofile 0: leave the limit alone, raising it needs CAP_SYS_RESOURCE
        with background(self.daemon, "--config", config, "--mountpoint", directory, "--bootstrap", made.bootstrap,
                        "--log-level", "warn", "--rlimit-nofile", "0", log=cache.with_suffix(".log"),
                        ready=lambda: directory.is_mount()):
            try:
                yield directory
            finally:
                run("umount", directory)


def wrap(layout, tag, made, config):
    """Store an image in an OCI layout: its blobs, and a bootstrap layer as the last."""
    ids = blob_ids(made.bootstrap)
    layers = [layout.add_file(made.blobs / name, BLOB_MEDIA_TYPE, annotations={f"{ANNOTATION}blob": "true"})
              for name in ids]
    for layer, name in zip(layers, ids):
        if layer["digest"] != f"sha256:{name}":
            raise CommandFailed(["wrap", tag], 1, f"blob {name} has the digest {layer['digest']}".encode())
    members = {"image/image.boot": made.bootstrap}
    members |= {f"image/{name}.blob.meta": made.metas[name] for name in ids if name in made.metas}
    tar = bootstrap_tar(members)
    packed = made.bootstrap.with_name(f"{tag}.tar.gz")
    packed.write_bytes(gzip.compress(tar, mtime=0))
    layers.append(layout.add_file(packed, f"{MEDIA}.layer.v1.tar+gzip", annotations={
        f"{ANNOTATION}bootstrap": "true", f"{ANNOTATION}fs-version": str(fs_version(made.bootstrap))}))
    diff_ids = [f"sha256:{name}" for name in ids] + [f"sha256:{hashlib.sha256(tar).hexdigest()}"]
    layout.add_image(config | {"rootfs": {"type": "layers", "diff_ids": diff_ids}}, layers, tag)


def bootstrap_tar(members):
    """A tar of the directory `image` and these files below it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        directory = tarfile.TarInfo("image")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(directory)
        for name, path in members.items():
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o444, path.stat().st_size
            with open(path, "rb") as file:
                tar.addfile(entry, file)
    return buffer.getvalue()


def sha256(path):
    """The digest of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
