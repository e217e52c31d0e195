"""Nodes as network namespaces, with addresses, that reach only each other."""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass

from . import end, run
from .processors import processors

NET = "10.88.0"
HUB = f"{NET}.1"
_OWN = "LAZULI_OWN_NETWORK"


def enter():
    """Go on in a network namespace of our own, which has the bridge that nodes are joined to. It is
    gone with the processes in it."""
    if _OWN not in os.environ:
        os.environ[_OWN] = "1"
        os.execvp("unshare", ["unshare", "--net", *sys.orig_argv])
    del os.environ[_OWN]
    ip("link set lo up")
    ip("link add lan type bridge")
    ip(f"address add {HUB}/24 dev lan")
    ip("link set lan up")


@dataclass
class Namespace:
    """A node of the network."""

    address: str
    holder: subprocess.Popen
    within: list  # begins the command line of whatever runs there

    def inside(self, *command):
        """The command line that runs a command there. Its mounts are seen everywhere."""
        return [*self.within, "nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--", *map(str, command)]


@contextlib.contextmanager
def node(number, cpus=None):
    """A node with the address NET.number, 2 to 254, and so many processors."""
    with contextlib.nullcontext([]) if cpus is None else processors(f"lazuli-lab-{number}", cpus) as within:
        with namespace(number, within) as there:
            yield there


@contextlib.contextmanager
def namespace(number, within):
    """A node whose programs are started by what the command line `within` begins."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # What comes back went through a process that is there.
        holder.stdin.write(b"?")
        holder.stdin.flush()
        holder.stdout.read(1)
        there = Namespace(f"{NET}.{number}", holder, within)
        ip(f"link add port{number} type veth peer name eth0 netns {holder.pid}")
        ip(f"link set port{number} master lan up")
        for command in (f"address add {there.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            run(*there.inside("ip", *command.split()))
        yield there
    finally:
        # The kernel takes its time to remove what only a namespace held.
        subprocess.run(["ip", "link", "delete", f"port{number}"], stderr=subprocess.DEVNULL)
        end(holder)


def ip(command):
    run("ip", *command.split())
