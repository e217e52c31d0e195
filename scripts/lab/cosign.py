"""The real cosign, with a key pair of its own."""

import os

from . import REPOSITORY, run


class Cosign:
    """Signs images in registries. Its keys are in a directory, as cosign.key and cosign.pub."""

    def __init__(self, directory):
        self.directory = directory
        self.program = run(REPOSITORY / "scripts/cosign").decode().strip()
        self.environment = os.environ | {"HOME": str(directory), "COSIGN_PASSWORD": "secret"}
        self("generate-key-pair")

    def __call__(self, *arguments):
        return run(self.program, *arguments, cwd=self.directory, env=self.environment)

    @property
    def private(self):
        return self.directory / "cosign.key"

    @property
    def public(self):
        return self.directory / "cosign.pub"

    def sign(self, image, bundle=True):
        """Signs with a bundle that refers to the image, as cosign 3 does, or with a tag beside it, as cosign 2."""
        self("sign", "--yes", "--key", self.private, "--use-signing-config=false", "--tlog-upload=false",
             f"--new-bundle-format={str(bundle).lower()}", image)
