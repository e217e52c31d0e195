"""A long and narrow way to a server on this machine."""

import contextlib
import re
import subprocess

from . import REPOSITORY, end

WIRE = REPOSITORY / "target/release/wire"


@contextlib.contextmanager
def link(address, milliseconds, megabits):
    """A wire to HOST:PORT with this round trip and bandwidth; yields the address of its near end."""
    command = [WIRE, address, "--round-trip", milliseconds, "--megabits", megabits]
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        yield re.match(r"\S+", process.stdout.readline())[0]
    finally:
        end(process)
