"""Limits a group of programs to a share of the machine's processors."""

import contextlib
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD = 10_000  # microseconds; the kernel's 100 ms would let a start of a second run in ten steps


@contextlib.contextmanager
def processors(name, count):
    """So many processors, or a part of one. Yields what begins the command line of a program that
    is to have no more."""
    quota = int(count * PERIOD)
    legacy = CGROUPS / "cpu"
    group = (legacy if legacy.is_dir() else CGROUPS) / name
    # Programs are in a group below it, and so are containers that they start: runc puts them below
    # or beside its own.
    programs = group / "programs"
    programs.mkdir(parents=True)
    try:
        if legacy.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        yield ["sh", "-c", f'echo $$ > {programs}/cgroup.procs; exec "$@"', "sh"]
    finally:
        for directory in [programs, *(path for path in group.iterdir() if path.is_dir() and path != programs), group]:
            remove(directory)


def remove(directory):
    """Processes are seen in a group for a moment after their end."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            return directory.rmdir()
        time.sleep(0.1)
    directory.rmdir()
