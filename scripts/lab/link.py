"""A link with delay and limited bandwidth to a server on this machine."""

import contextlib
import os
import re
import subprocess
from pathlib import Path

from . import end
from .lazuli import Lazuli

# The test kit's, next to the lazuli that is measured unless WIRE names it.
WIRE = Path(os.environ.get("WIRE", Lazuli.BINARY.parent / "wire"))


@contextlib.contextmanager
def link(address, milliseconds, megabits, slow_start=True, at=None):
    """A wire to HOST:PORT with this round trip and bandwidth; yields the address of its near end,
    which is on loopback if it is not to be `at` another."""
    command = [WIRE, address, "--round-trip", milliseconds, "--megabits", megabits]
    command += [] if slow_start else ["--no-slow-start"]
    command += ["--at", at] if at else []
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        yield re.match(r"\S+", process.stdout.readline())[0]
    finally:
        end(process)
