"""The lazuli binary with a private state directory."""

import contextlib
import json
import os
import shutil
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

    def processes(self):
        """The ids of the daemon's two processes."""
        daemon = json.loads(self("status", "--json"))["daemon"]
        return [daemon["keeper_pid"], daemon["worker_pid"]]

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


class Node(Lazuli):
    """A Lazuli with a configuration of its own and a running daemon, which is gone with all that it
    has after the block."""

    def __init__(self, directory, config):
        super().__init__(directory / "root")
        self.directory, self.config = directory, directory / "config.toml"
        directory.mkdir()
        self.config.write_text(config)

    def command(self, *verb):
        return [*super().command()[:3], "--config", str(self.config), *map(str, verb)]

    def __enter__(self):
        # Any verb that needs the daemon starts it.
        (self.directory / "nothing").mkdir()
        self("convert", f"dir:{self.directory / 'nothing'}", f"oci:{self.directory / 'empty'}")
        (self.directory / "mnt").mkdir()
        self("mount", f"oci:{self.directory / 'empty'}", self.directory / "mnt")
        self("umount", self.directory / "mnt")
        return self

    def __exit__(self, *_):
        self.stop()
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def lazuli(root):
    """A Lazuli whose daemon is gone after the block."""
    instance = Lazuli(root)
    try:
        yield instance
    finally:
        instance.stop()
