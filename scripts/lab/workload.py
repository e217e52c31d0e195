"""Runs containers of the corpus until they are ready."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

from . import REPOSITORY, CommandFailed, end

TIMEOUT = 300


def ready_when(name):
    """What says that an image of the corpus is ready: (`exit` or `line`, a text) or (`http`,
    PORT/PATH)."""
    with open(REPOSITORY / "bench/corpus/workloads.toml", "rb") as file:
        workloads = tomllib.load(file)["workload"]
    workload = workloads[name]
    ready = workload.get("ready") or workloads[workload["like"]]["ready"]
    return next(iter(ready.items()))


def until_ready(command, ready):
    """Run a command until its container is ready, and end it; return the seconds that it took."""
    kind, what = ready
    began = time.monotonic()
    process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    os.set_blocking(process.stdout.fileno(), False)
    try:
        output = watch(process, kind, what, began + TIMEOUT)
        took = time.monotonic() - began
    finally:
        kill_container(process.pid)
        end(process)
    if output is not None:
        raise CommandFailed(command, process.returncode, output)
    return took


def kill_container(process):
    """Kill what a runc at or below a process has started: the first process of a container may
    ignore every other signal."""
    # It may be over at any time.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        name = Path(f"/proc/{process}/comm").read_text().strip()
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                if name == "runc":
                    os.kill(child, signal.SIGKILL)
                else:
                    kill_container(child)


def watch(process, kind, what, deadline):
    """Wait until ready; return the output if the command ended, or time is up, without it."""
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if kind == "http" and answers(what):
                return None
            if not selector.select(0.002 if kind == "http" else 1):
                continue
            piece = process.stdout.read()
            if piece:
                output += piece
            elif piece == b"":
                done = process.wait() == 0 and kind == "exit" and what.encode() in output
                return None if done else output
            if kind == "line" and what.encode() in output:
                return None
    return output


def answers(where):
    """Whether anything answers HTTP at PORT/PATH of the loopback interface."""
    port, path = where.split("/", 1)
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=1).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
