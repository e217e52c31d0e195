"""The lazuli binary with a private state directory."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

from . import REPOSITORY, run


class Lazuli:
    """Runs verbs of lazuli against a --root of its own; the daemon it starts ends with `stop`."""

    BINARY = Path(os.environ.get("LAZULI", REPOSITORY / "target/release/lazuli"))

    def __init__(self, root):
        self.root = Path(root)

    def command(self, *verb):
        """The command line of a verb."""
        return [str(self.BINARY), "--root", str(self.root), *map(str, verb)]

    def __call__(self, *verb):
        """Run a verb; return what it prints."""
        return run(*self.command(*verb))

    def status(self, mountpoint):
        """What `status --json` says of one mount."""
        mounts = json.loads(self("status", "--json"))["mounts"]
        return next(mount for mount in mounts if mount["mountpoint"] == str(mountpoint))

    @contextlib.contextmanager
    def mounted(self, image, directory, driver):
        """An image mounted at a directory, which is made."""
        directory.mkdir(parents=True)
        self("mount", image, directory, "--driver", driver)
        try:
            yield directory
        finally:
            self("umount", directory)

    def stop(self):
        """End the daemon, if there is one, whatever it still has mounted."""
        subprocess.run(self.command("stop", "--force"), stdin=subprocess.DEVNULL, capture_output=True)


@contextlib.contextmanager
def lazuli(root):
    """A Lazuli whose daemon is gone after the block."""
    instance = Lazuli(root)
    try:
        yield instance
    finally:
        instance.stop()
