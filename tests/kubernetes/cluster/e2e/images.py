"""Images for the scenarios, in the node's registries."""

import io
import os
import shutil
import sys
import tarfile

from .docs import REPOSITORY
from .shell import run

sys.path.insert(0, str(REPOSITORY / "scripts"))

from lab.oci import Layout  # noqa: E402

OPEN, PRIVATE = "127.0.0.1:5000", "127.0.0.1:5001"
NODE_IMAGE = f"{OPEN}/lazuli-node"
LOGIN = "puller:secret"


class Images:
    """What is pushed."""

    def __init__(self, node, lazuli, testkit, corpus, scratch):
        self.node, self.lazuli, self.testkit, self.corpus, self.scratch = node, lazuli, testkit, corpus, scratch

    def push_all(self):
        """Those that most scenarios use."""
        run(self.testkit / "cri", "pause", f"{OPEN}/pause:1", self.scratch / "pause.tar")
        self.copy(f"oci-archive:{self.scratch / 'pause.tar'}", f"{OPEN}/pause:1")
        self.push("busybox")
        self.push("redis")
        for name in ("busybox", "redis", "debian-slim"):
            self.convert(name, f"{OPEN}/{name}:lazy")
        self.convert("redis-next", f"{OPEN}/redis-next:both", "--keep-oci")
        self.convert("redis", f"{self.scratch}/private:1", layout=True)
        self.copy(f"oci:{self.scratch}/private:1", f"{PRIVATE}/redis:lazy", "--dest-creds", LOGIN)
        self.node_image("1", self.lazuli.read_bytes())

    def push(self, name):
        """Pushes an image of the corpus as it is."""
        self.copy(f"oci:{self.corpus}/{name}:latest", f"{OPEN}/{name}:plain")

    def copy(self, source, target, *options):
        """Pushes an image as it is."""
        self.node.beside("skopeo", "copy", "--insecure-policy", "--quiet", "--dest-tls-verify=false", *options, source, f"docker://{target}")

    def convert(self, name, target, *options, layout=False):
        """Pushes the lazy form of an image of the corpus."""
        place = f"oci:{target}" if layout else target
        environment = ["env", f"TMPDIR={self.scratch}"]
        self.node.beside(*environment, self.lazuli, "--root", self.scratch / "convert", "convert", *options, f"oci:{self.corpus}/{name}:latest", place)

    def node_image(self, tag, program):
        """What dist/kubernetes/Dockerfile makes, with `program`."""
        layout = self.scratch / f"node-{tag}"
        shutil.copytree(self.corpus / "debian-slim", layout)
        files, unit_edit = {}, None
        sent = (REPOSITORY / ".dockerignore").read_text().splitlines()
        for line in (REPOSITORY / "dist/kubernetes/Dockerfile").read_text().splitlines():
            match line.split(maxsplit=1):
                case ["COPY", paths]:
                    source, target = paths.split()
                    built = source == "target/static/lazuli-${TARGETARCH}"
                    pattern = "target/static/lazuli-*" if built else source
                    assert f"!{pattern}" in sent, f".dockerignore keeps {source} from docker"
                    content = program if built else (REPOSITORY / source).read_bytes()
                    files[target.lstrip("/")] = content
                case ["RUN", command]:
                    unit_edit = command
        assert unit_edit == "sed -i 's|/usr/bin/lazuli|/opt/lazuli/bin/lazuli|' /lazuli/lazuli.service", unit_edit
        files["lazuli/lazuli.service"] = files["lazuli/lazuli.service"].replace(b"/usr/bin/lazuli", b"/opt/lazuli/bin/lazuli")
        layer = self.scratch / f"node-{tag}.tar"
        with tarfile.open(layer, "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o755
                tar.addfile(member, io.BytesIO(content))
        run("umoci", "raw", "add-layer", "--image", f"{layout}:latest", layer)
        run("umoci", "config", "--image", f"{layout}:latest", "--config.entrypoint", "install-node", "--config.cmd", "install")
        self.copy(f"oci:{layout}:latest", f"{NODE_IMAGE}:{tag}")
        for path in (layout, layer):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def variant(self, name, tag, size):
        """A lazy image with a file of `size` random bytes that no other image has."""
        return self.with_ballast(name, os.urandom(size), f"{OPEN}/{name}:{tag}")

    def private(self, name, tag, size):
        """A variant in the registry that asks for a login."""
        layout = self.scratch / "private-variant"
        self.with_ballast(name, os.urandom(size), f"oci:{layout}:1")
        self.copy(f"oci:{layout}:1", f"{PRIVATE}/{name}:{tag}", "--dest-creds", LOGIN)
        shutil.rmtree(layout)
        return f"{PRIVATE}/{name}:{tag}"

    def model(self, files):
        """An artifact as ModelPack's tools make it, and the image made of it, which is returned."""
        layout = Layout.create(self.scratch / "model")
        layers = []
        for path, content in files.items():
            (self.scratch / "file").write_bytes(content)
            annotations = {"org.cncf.model.filepath": path}
            layers.append(layout.add_file(self.scratch / "file", "application/vnd.cncf.model.weight.v1.raw", annotations=annotations))
            (self.scratch / "file").unlink()
        layout.add_artifact("application/vnd.cncf.model.manifest.v1+json", layers)
        for verb, source, target in (("copy", f"oci:{layout.directory}:latest", f"{OPEN}/model:1"), ("convert", f"{OPEN}/model:1", f"{OPEN}/model:volume")):
            self.node.beside("env", f"TMPDIR={self.scratch}", self.lazuli, "--root", self.scratch / "convert", verb, source, target)
        shutil.rmtree(layout.directory)
        return f"{OPEN}/model:volume"

    def with_ballast(self, name, content, target):
        """Stores the lazy form of an image with a file /ballast that has this content."""
        layout = self.scratch / "variant"
        shutil.copytree(self.corpus / name, layout)
        layer = self.scratch / "variant.tar"
        with tarfile.open(layer, "w") as tar:
            member = tarfile.TarInfo("ballast")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        run("umoci", "raw", "add-layer", "--image", f"{layout}:latest", layer)
        self.node.beside("env", f"TMPDIR={self.scratch}", self.lazuli, "--root", self.scratch / "convert", "convert", f"oci:{layout}:latest", target)
        shutil.rmtree(layout)
        layer.unlink()
        return target
