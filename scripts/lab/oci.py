"""Reading and writing OCI image layouts."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

MEDIA = "application/vnd.oci.image"


class Layout:
    """A directory in the OCI image layout."""

    def __init__(self, directory):
        self.directory = Path(directory)

    def blob(self, digest):
        """The path of a blob."""
        return self.directory / "blobs" / digest.replace(":", "/")

    def manifest(self, tag="latest"):
        """The manifest that a tag names."""
        for entry in json.loads((self.directory / "index.json").read_text())["manifests"]:
            if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag:
                return self.json(entry["digest"])
        raise KeyError(f"{self.directory}: no tag {tag}")

    def json(self, digest):
        """A blob that is JSON."""
        return json.loads(self.blob(digest).read_text())

    def extract(self, layer, member, target):
        """Copy one file out of a (compressed) tar layer."""
        with open(target, "wb") as out:
            subprocess.run(["tar", "-xOf", self.blob(layer["digest"]), member], stdout=out, check=True)

    @classmethod
    def create(cls, directory):
        """A new layout that has no image yet."""
        layout = cls(directory)
        (layout.directory / "blobs/sha256").mkdir(parents=True)
        (layout.directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        layout.write_index([])
        return layout

    def add_file(self, path, media_type, **fields):
        """Take a file in as a blob; return its descriptor."""
        with open(path, "rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if not self.blob(digest).exists():
            try:
                os.link(path, self.blob(digest))
            except OSError: # another file system
                shutil.copyfile(path, self.blob(digest))
        return {"mediaType": media_type, "digest": digest, "size": Path(path).stat().st_size, **fields}

    def add_json(self, value, media_type):
        """Store a JSON blob; return its descriptor."""
        data = json.dumps(value).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blob(digest).write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def add_image(self, config, layers, tag="latest"):
        """Store a config and a manifest, and tag the image."""
        self.add_manifest({"config": self.add_json(config, f"{MEDIA}.config.v1+json"), "layers": layers}, tag)

    def add_artifact(self, kind, layers, tag="latest"):
        """Store an artifact without a configuration, and tag it."""
        config = self.add_json({}, f"{MEDIA.replace('image', 'empty')}.v1+json")
        self.add_manifest({"artifactType": kind, "config": config, "layers": layers}, tag)

    def add_manifest(self, fields, tag):
        """Store a manifest, and tag it."""
        manifest = {"schemaVersion": 2, "mediaType": f"{MEDIA}.manifest.v1+json", **fields}
        entry = self.add_json(manifest, f"{MEDIA}.manifest.v1+json")
        entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
        index = json.loads((self.directory / "index.json").read_text())
        self.write_index([*index["manifests"], entry])

    def write_index(self, manifests):
        """Replace the index."""
        (self.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))


def layers_size(manifest):
    """The bytes that a full pull of an image moves, manifest and config aside."""
    return sum(layer["size"] for layer in manifest["layers"])
