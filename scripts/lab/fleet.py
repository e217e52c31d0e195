"""Many nodes that start one image at once, far from the registry and near each other."""

import contextlib
import resource
import threading
import time
from dataclasses import dataclass, field

from . import dragonfly, drop_caches, run, used
from .coldstart import pulled, watch
from .lazuli import Node
from .link import link
from .network import HUB, node
from .registry import remote_registry

PORT = 5000
# How long a scheduler without a manager takes to know a seed peer.
SEED_KNOWN = 31


@dataclass
class Herd:
    """What came of a start on all nodes."""

    ready: list  # seconds until the first output, by node
    registry_bytes: int
    registry_requests: int
    traffic: dict = field(default_factory=dict)  # bytes of all dfdaemons, by where they came from
    seconds: dict = field(default_factory=dict)  # of processors, by program
    again: list = field(default_factory=list)  # seconds of another start, when everything is there


class FleetNode(Node):
    """A Lazuli on a node of the network."""

    def __init__(self, directory, namespace, config):
        super().__init__(directory, config)
        self.namespace = namespace

    def command(self, *verb):
        return self.namespace.inside(*super().command(*verb))


@contextlib.contextmanager
def site(directory, milliseconds, megabits):
    """A registry at the other end of a link that all nodes share."""
    with remote_registry(directory) as server:
        with link(server.address, milliseconds, megabits, at=f"{HUB}:{PORT}") as near:
            server.near = near
            yield server


@contextlib.contextmanager
def fleet(directory, nodes, p2p, cpus=None, seeds=0, scheduler=None, daemon=None, more="", socket=False, small_disk=False):
    """So many nodes with a Lazuli each, that has nothing, and so many processors; `p2p`: also a
    dfdaemon, beside a scheduler and so many seed peers that run nothing. `scheduler` and `daemon`
    are changes of their configuration, `more` is of Lazuli's, `socket`: it is told of dfdaemon's,
    `small_disk`: the last dfdaemon has a file system of 1 GiB. Yields Lazulis and daemons."""
    directory.mkdir()
    hosts = directory / f"hosts/{HUB}_{PORT}_"
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(f'server = "http://{HUB}:{PORT}"\n')
    config = [f'hosts_dir = "{hosts.parent}"\n{more}'] * nodes
    if p2p:
        config = [one + '[p2p]\nengine = "dragonfly"\n' for one in config]
    if socket:
        config = [one + socket_of(directory / f"dfdaemon{number}") for number, one in enumerate(config)]
    with contextlib.ExitStack() as stack:
        daemons = []
        if p2p:
            daemons.append(stack.enter_context(dragonfly.scheduler(directory / "scheduler", **(scheduler or {}))))
        places = [stack.enter_context(node(10 + number, cpus)) for number in range(nodes)]
        if p2p:
            for number in range(seeds):
                place = stack.enter_context(node(240 + number))
                daemons.append(stack.enter_context(dragonfly.daemon(directory / f"seed{number}", place, f"seed{number}", seed=True)))
            began = time.monotonic() if seeds else 0
            for number, place in enumerate(places):
                there = directory / f"dfdaemon{number}"
                if small_disk and number == nodes - 1:
                    stack.enter_context(disk(there))
                daemons.append(stack.enter_context(dragonfly.daemon(there, place, f"node{number}", **(daemon or {}))))
        lazulis = [stack.enter_context(FleetNode(directory / f"node{number}", place, config[number]))
                   for number, place in enumerate(places)]
        if p2p:
            time.sleep(max(0, began + SEED_KNOWN - time.monotonic()) if seeds else 1)
        yield lazulis, daemons


@contextlib.contextmanager
def disk(directory):
    """A small file system at a new directory."""
    directory.mkdir()
    image = directory.parent / f"{directory.name}.ext4"
    run("truncate", "--size", "1G", image)
    run("mkfs.ext4", "-q", image)
    run("mount", "-o", "loop", image, directory)
    try:
        yield
    finally:
        run("umount", "--lazy", directory)


def socket_of(dfdaemon):
    """Configuration of Lazuli."""
    links = dfdaemon.parent / f"{dfdaemon.name}-links"
    links.mkdir()
    return f'socket = "{dfdaemon / "dfdaemon.sock"}"\nlinks = "{links}"\n'


def start(server, lazulis, daemons, reference, argv, expect, pull=None):
    """Start an image on all nodes at once; `pull`: a directory to pull and unpack it into as
    usual."""
    ready, failures = [None] * len(lazulis), []
    barrier = threading.Barrier(len(lazulis))

    def run_one(number, lazuli):
        try:
            barrier.wait()
            if pull:
                work = pull / str(number)
                work.mkdir(parents=True)
                ready[number], _ = pulled(reference, argv, expect, work, lazuli.namespace.inside)
            else:
                ready[number], _ = watch(lazuli.command("run", reference, "--", *argv), expect, time.monotonic())
        except Exception as error:  # told by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=run_one, args=pair) for pair in enumerate(lazulis)]
    drop_caches()
    before = spent(lazulis, daemons)
    with server.counted() as traffic:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    after = spent(lazulis, daemons)
    seconds = {name: round(after[name] - before[name], 2) for name in after}
    herd = Herd(sorted(ready), traffic.bytes, traffic.requests, seconds=seconds)
    for peer in daemons[1:]:
        for kind, count in peer.traffic().items():
            herd.traffic[kind] = herd.traffic.get(kind, 0) + count
    return herd


def spent(lazulis, daemons):
    """Processor seconds so far of each kind of program; `run` is all that has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {"run": children.ru_utime + children.ru_stime,
             "lazuli": used(process for lazuli in lazulis for process in lazuli.processes())}
    if daemons:
        found |= {"scheduler": used([daemons[0].process.pid]), "dfdaemon": used(peer.process.pid for peer in daemons[1:])}
    return found
