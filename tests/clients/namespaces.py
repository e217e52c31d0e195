"""Namespaces whose processes and mounts end with a command."""

import contextlib
import os
import subprocess
from pathlib import Path

# The first process of the namespaces, which reaps what is left to it. The copy of a mount keeps a
# file system of others alive; containers get no network but loopback.
FIRST = r"""
ours='s/^([^ ]+ ){4}([^ ]+) .* - (erofs|fuse.lazuli|fuse.lazuli-layers) .*/\2/p'
for place in $(sed -nE "$ours" /proc/self/mountinfo); do umount -l "$place"; done
ip link set lo up
mount -t tmpfs tmpfs /run
"$@"
exit $?
"""


def run(name, *command):
    """Run a command in namespaces; returns its exit status. The names of the containers' cgroups
    begin with `name`; they are removed."""
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    shell = ["bash", "-c", FIRST, "bash", *map(str, command)]
    process = subprocess.Popen([*unshare, *shell], stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        remove_cgroups(name)


def remove_cgroups(name):
    """Remove the groups of containers, whose processes are gone."""
    for group in Path("/sys/fs/cgroup").glob(f"*/{name}*"):
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
