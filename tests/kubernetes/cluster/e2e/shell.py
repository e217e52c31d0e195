"""Runs programs, and waits for conditions."""

import os
import subprocess
import time

from .table import Failed

# How many times longer than usual everything may take: an emulated machine is slow.
PATIENCE = float(os.environ.get("LAZULI_PATIENCE", 1))


def run(*command, **options):
    """Runs a program and returns what it printed, without the last end of line.

    A failure says which program it was, and what it printed.
    """
    if "timeout" in options:
        options["timeout"] *= PATIENCE
    result = subprocess.run([str(part) for part in command], text=True, capture_output=True, **options)
    if result.returncode:
        said = (result.stderr or result.stdout).strip()[-2000:]
        raise Failed(f"`{' '.join(map(str, command))[:300]}` ended with {result.returncode}: {said}")
    return result.stdout.rstrip("\n")


def wait(seconds, what, condition, step=0.2):
    """Waits until `condition()` is true, and returns what it returned; `what` names it in the
    failure.

    A condition that fails is not true yet.
    """
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    last = ""
    while True:
        try:
            found = condition()
            if found:
                return found
        except Failed as error:
            last = f": {error}"
        if time.monotonic() > deadline:
            raise Failed(f"waited {seconds:.0f} s for {what}{last}")
        time.sleep(step)
