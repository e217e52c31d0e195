"""Compares programs on complete images with programs on the disk's own file system.

Files: a big file, many small ones and the source of a C program lie on the disk's file system,
which is `native`. Lazuli converts them, and mounts them with both drivers. In each round every test
runs once on every side:

  seq read, rand read   fio, psync, 4 KiB, buffered
  tar                   of the source, through a pipe: GNU tar reads no file for an archive that is /dev/null
  find, ls -lR          of the small files
  compile               libbfd of binutils, out of tree, with what it writes on the disk

In containers: `lazuli run`, with either driver, and runc. Both have overlayfs take the writes, on
the disk; runc's lies on an unpacked tree. `native` is the host itself for libaio; the others have
none, and are compared with runc.

  libaio                fio, 64 4 KiB random reads at a time, buffered: EROFS has no O_DIRECT for mounts of files
  pgbench, pgbench -S   PostgreSQL with TPC-B and with nothing but SELECT, over a Unix socket
  redis SET, redis GET  redis-benchmark, over a Unix socket
  nginx                 wrk, of one small page over loopback

Before that, all of the images has been fetched: the fanotify driver takes no more part, so the
kernel must not ask it anything meanwhile. Caches are dropped before each test; programs that serve
are measured when they are up.

Prints medians, and speeds as ratios to native, or else to runc: medians of the rounds' ratios. More
is better in all units.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lab import (REPOSITORY, corpus, drop_caches, end, fair_scheduling, median, need_root, run, scratch, table,
                 wait_until)
from lab.coldstart import DRIVERS
from lab.lazuli import lazuli
from lab.registry import free_address
from lab.workload import answers, kill_container

from .results import write

NATIVE, RUNC = "native", "runc"
SIDES = (NATIVE, *DRIVERS)
UNITS = {"seq read": "MiB/s", "rand read": "MiB/s", "tar": "1/s", "find": "1/s", "ls -lR": "1/s", "compile": "1/h",
         "libaio": "MiB/s", "pgbench": "tps", "pgbench -S": "tps",
         "redis SET": "1/s", "redis GET": "1/s", "nginx": "1/s"}
# Seconds after which the start of a complete image is over, and some more.
START = 40
IMAGES = ("postgres", "redis", "nginx")
FILES_PER_DIRECTORY = 300
# Of package binutils-source. What libbfd does not need is most of it.
SOURCE = "/usr/src/binutils"
NOT_BUILT = ("gas", "gold", "gprofng", "ld")
# Those of `docker run` that the images' commands need; umoci and runc leave them out.
CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID"]

# PostgreSQL has its files fsync'ed as always, but for those of initdb, which are not measured.
PGBENCH = """
initdb --auth=trust --no-sync >/dev/null
pg_ctl start --wait --log=/tmp/log --options="-k /tmp -c listen_addresses=''" >/dev/null
createdb --host=/tmp bench
pgbench --host=/tmp --initialize --quiet --scale=10 bench >/dev/null 2>&1
pgbench --host=/tmp --client=4 --jobs=2 --time=$1 bench
pgbench --host=/tmp --client=4 --jobs=2 --time=$1 --select-only bench
pg_ctl stop --mode=immediate >/dev/null
"""
REDIS = """
redis-server --port 0 --unixsocket /tmp/redis.sock --save '' >/dev/null &
until redis-cli -s /tmp/redis.sock ping >/dev/null 2>&1; do sleep 0.05; done
redis-benchmark -s /tmp/redis.sock -t set,get -n $1 --csv
redis-cli -s /tmp/redis.sock shutdown
"""
# redis-benchmark takes a number of requests, about as many as are answered in a second.
REDIS_PER_SECOND = 50_000
NGINX = """
cat >/tmp/nginx.conf <<END
daemon off;
worker_processes 2;
events {}
http {
  access_log off;
  sendfile on;
  server { listen $1; root /var/www/html; index index.nginx-debian.html; }
}
END
exec nginx -c /tmp/nginx.conf
"""


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=512, help="MiB of the big file")
    parser.add_argument("--files", type=int, default=30_000, help="small files")
    parser.add_argument("--seconds", type=int, default=5, help="how long each program that serves is measured")
    parser.add_argument("--test", action="append", choices=TESTS, help="only this one, and those measured with it")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "target/bench/fs.json")
    args = parser.parse_args(argv)
    need_root()

    with scratch("fs") as work, lazuli(work / "root") as instance, fair_scheduling():
        bench = Bench(work, instance, args)
        with bench.mounted():
            bench.prepare_builds()
            before = bench.events()
            rounds = measure(bench, args.rounds)
            events = bench.events() - before
    tests = [{"test": test, "side": side, "unit": UNITS[test], "values": [one[test][side] for one in rounds]}
             for test in rounds[0] for side in rounds[0][test]]
    write(args.json, "fs", argv, rounds=args.rounds, big_file_mib=args.size, small_files=args.files, seconds=args.seconds,
          tests=tests, fanotify_events=events)
    print(f"\n{args.size} MiB file and {args.files} small files, {args.rounds} rounds; "
          f"fanotify events meanwhile: {events}\n\n{summary(rounds)}")


class Bench:
    """The trees and images, and the tests on them."""

    def __init__(self, work, instance, args):
        self.work, self.instance, self.seconds = work, instance, args.seconds
        self.tests = {name: test for name, test in TESTS.items() if name in (args.test or TESTS)}
        # Of the images: the unpacked tree, runc's configuration, and the name for lazuli.
        self.images = {"tree": (make_tree(work / "tree", args.size, args.files), self.plain_config(), self.image("tree"))}
        instance("convert", f"dir:{work / 'tree'}", self.image("tree"))
        names = [name for name in IMAGES if SERVED_BY[name] in self.tests]
        directory = corpus(*names) if names else None
        for name in names:
            bundle, layout = work / f"bundle-{name}", f"{directory / name}:latest"
            run("umoci", "unpack", "--image", layout, bundle)
            instance("convert", f"oci:{layout}", self.image(name))
            self.images[name] = (bundle / "rootfs", json.loads((bundle / "config.json").read_text()), self.image(name))
        self.directories = {NATIVE: work / "tree"} | {driver: work / driver / "tree" for driver in DRIVERS}

    def image(self, name):
        """An image in the layout that lazuli writes to."""
        return f"oci:{self.work / 'layout'}:{name}"

    def plain_config(self):
        """The configuration of a container that has no image."""
        (self.work / "plain").mkdir()
        run("runc", "spec", "--bundle", self.work / "plain")
        return json.loads((self.work / "plain/config.json").read_text())

    @contextlib.contextmanager
    def mounted(self):
        """All images mounted with both drivers, and complete."""
        with contextlib.ExitStack() as stack:
            for name, (_, _, image) in self.images.items():
                for driver in DRIVERS:
                    mountpoint = self.work / driver / name
                    stack.enter_context(self.instance.mounted(image, mountpoint, driver))
                # Also what no file of the image shows, such as what an upper layer has replaced.
                self.instance("prefetch", "--wait", image)
            # Until the start of a complete image counts as over, it is read through the page cache.
            time.sleep(START)
            yield

    def events(self):
        """What the kernel has asked the fanotify driver so far; the images must have all of their
        chunks."""
        events = 0
        for name in self.images:
            status = self.instance.status(self.work / "fanotify" / name)
            if status["chunks_ready"] != status["chunks_total"]:
                raise RuntimeError(f"{name}: {status['chunks_ready']} of {status['chunks_total']} chunks after prefetch --wait")
            events += status["events"]
        return events

    def prepare_builds(self):
        """A directory for each side to compile in, with what `configure` decides there, and what
        libbfd is linked with."""
        if "compile" not in self.tests:
            return
        for side, directory in self.directories.items():
            build = self.build(side)
            build.mkdir()
            run(directory / "source/configure", "--disable-nls", "CFLAGS=-O", "MAKEINFO=true", cwd=build)
            self.make(build, "all-libiberty", "all-zlib", "all-libsframe", "configure-bfd")

    def build(self, side):
        return self.work / f"build-{side}"

    @contextlib.contextmanager
    def container(self, side, name, *argv):
        """The command that runs `argv` in a new container of an image on this side."""
        lower, config, image = self.images[name]
        if side in DRIVERS:
            yield self.instance.command("run", "--driver", side, image, "--", *argv)
            return
        bundle = self.work / "container"
        for directory in ("upper", "work", "rootfs"):
            (bundle / directory).mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(as_lazuli_runs(config, argv)))
        runc, container = ["runc", "--root", bundle / "runc"], f"lazuli-bench-{os.getpid()}"
        run("mount", "-t", "overlay", "overlay", "-o",
            f"lowerdir={lower},upperdir={bundle / 'upper'},workdir={bundle / 'work'}", bundle / "rootfs")
        try:
            yield [*runc, "run", "--bundle", bundle, container]
        finally:
            subprocess.run([*runc, "delete", "--force", container], capture_output=True)
            run("umount", bundle / "rootfs")
            shutil.rmtree(bundle)

    def psync(self, mode):
        def test(side, turn):
            return fio_speed(run(*fio_command(self.directories[side] / "big", mode, turn, "--ioengine=psync")))
        return test

    def tar(self, side, _):
        run("tar", "--version")
        run("cat", os.devnull)
        began = time.monotonic()
        with subprocess.Popen(["tar", "-cf", "-", "-C", self.directories[side] / "source", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(["cat"], stdin=tar.stdout, stdout=subprocess.DEVNULL, check=True)
        if tar.returncode:
            raise RuntimeError(f"tar: exit status {tar.returncode}")
        return 1 / (time.monotonic() - began)

    def walk(self, *command):
        def test(side, _):
            # The program is the disk's on every side.
            run(*command, os.devnull)
            began = time.monotonic()
            subprocess.run([*command, self.directories[side] / "files"], check=True, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL)
            return 1 / (time.monotonic() - began)
        return test

    def compile(self, side, _):
        build = self.build(side)
        run("make", "-C", build / "bfd", "clean")
        drop_caches()
        # The compiler is the disk's on every side.
        run("cc", "-O", "-x", "c", "-c", os.devnull, "-o", build / "nothing.o")
        began = time.monotonic()
        self.make(build, "all-bfd")
        return 3600 / (time.monotonic() - began)

    def make(self, build, *targets):
        """Documentation, which takes another package, is left out."""
        run("make", f"--jobs={os.cpu_count()}", "MAKEINFO=true", *targets, cwd=build)

    def libaio(self, side, turn):
        options = ("--ioengine=libaio", "--iodepth=64")
        if side == NATIVE:
            return fio_speed(run(*fio_command(self.directories[side] / "big", "randread", turn, *options)))
        with self.container(side, "tree", *fio_command("/big", "randread", turn, *options)) as command:
            return fio_speed(run(*command))

    def pgbench(self, side, _):
        output = self.script(side, "postgres", PGBENCH, self.seconds)
        return dict(zip(("pgbench", "pgbench -S"), map(float, re.findall(r"^tps = ([\d.]+)", output, re.MULTILINE))))

    def redis(self, side, _):
        output = self.script(side, "redis", REDIS, self.seconds * REDIS_PER_SECOND)
        return {f"redis {kind}": float(speed) for kind, speed in re.findall(r'^"(SET|GET)","([\d.]+)"', output, re.MULTILINE)}

    def script(self, side, name, text, *argv):
        """What a shell script prints in a container."""
        with self.container(side, name, "sh", "-e", "-c", text, "sh", *map(str, argv)) as command:
            return run(*command).decode()

    def nginx(self, side, _):
        address = free_address()
        port = address.rpartition(":")[2]
        with self.container(side, "nginx", "sh", "-e", "-c", NGINX, "sh", address) as command:
            process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL)
            try:
                wait_until(lambda: answers(f"{port}/"), 60, "nginx")
                output = run("wrk", "--threads", "2", "--connections", "16", "--duration", f"{self.seconds}s",
                             f"http://{address}/").decode()
            finally:
                kill_container(process.pid)
                end(process)
        if "Non-2xx" in output:
            raise RuntimeError(f"wrk: {output}")
        return float(re.search(r"Requests/sec: *([\d.]+)", output)[1])


# What --test names: the sides, and the test, which returns a speed, or several by name.
TESTS = {
    "seq read": (SIDES, lambda bench: bench.psync("read")),
    "rand read": (SIDES, lambda bench: bench.psync("randread")),
    "tar": (SIDES, lambda bench: bench.tar),
    "find": (SIDES, lambda bench: bench.walk("find")),
    "ls -lR": (SIDES, lambda bench: bench.walk("ls", "-lR")),
    "compile": (SIDES, lambda bench: bench.compile),
    "libaio": ((NATIVE, RUNC, *DRIVERS), lambda bench: bench.libaio),
    "pgbench": ((RUNC, *DRIVERS), lambda bench: bench.pgbench),
    "redis": ((RUNC, *DRIVERS), lambda bench: bench.redis),
    "nginx": ((RUNC, *DRIVERS), lambda bench: bench.nginx),
}
SERVED_BY = {"postgres": "pgbench", "redis": "redis", "nginx": "nginx"}


def make_tree(tree, size, files):
    """The big file does not compress; the small ones are 0.5 to 8 KiB, as in a package. With them
    the source, and fio."""
    chance = random.Random(1)
    tree.mkdir()
    with open(tree / "big", "wb") as big:
        for _ in range(size):
            big.write(chance.randbytes(1 << 20))
    for number in range(files):
        directory = tree / f"files/d{number // FILES_PER_DIRECTORY:04}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"file-{number}").write_bytes(chance.randbytes(chance.randrange(512, 8192)))
    source = tree / "source"
    source.mkdir()
    archive = next(Path(SOURCE).glob("binutils-*.tar.xz"))
    run("tar", "-xf", archive, "--no-same-owner", "--strip-components=1", *(f"--exclude=binutils-*/{part}" for part in NOT_BUILT),
        "-C", source)
    copy_program("fio", tree)
    return tree


def copy_program(program, tree):
    """Copy a program to where the PATH of containers looks, and its loader and libraries to where
    they are here."""
    path = shutil.which(program)
    libraries = re.findall(r"(/\S+) \(0x", run("ldd", path).decode())
    for path, place in [(path, f"/usr/bin/{program}"), *zip(libraries, libraries)]:
        copy = tree / place.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def as_lazuli_runs(config, argv):
    """runc's configuration of a container as those of `lazuli run` are: the host's network, and no
    seccomp filter, which would cost something for each system call."""
    config = json.loads(json.dumps(config))
    config["process"] |= {"terminal": False, "args": list(map(str, argv)), "rlimits": [],
                          "capabilities": dict.fromkeys(["bounding", "effective", "permitted"], CAPABILITIES)}
    config["root"] = {"path": "rootfs"}
    config["linux"]["namespaces"] = [space for space in config["linux"]["namespaces"] if space["type"] != "network"]
    config["linux"].pop("seccomp", None)
    return config


def measure(bench, rounds):
    """A list of rounds: per test and side, the speed."""
    results = []
    for turn in range(rounds):
        speeds = {}
        for name, (sides, make) in bench.tests.items():
            test, turned = make(bench), turn % len(sides)
            for side in sides[turned:] + sides[:turned]:
                drop_caches()
                speed = test(side, turn)
                for kind, value in (speed if isinstance(speed, dict) else {name: speed}).items():
                    speeds.setdefault(kind, {})[side] = value
        results.append({test: {side: speeds[test][side] for side in (NATIVE, RUNC, *DRIVERS) if side in speeds[test]}
                        for test in speeds})
        print(f"round {turn + 1}: " + ", ".join(
            f"{test} " + "/".join(f"{values[side] / values[base(values)]:.2f}" for side in DRIVERS)
            for test, values in speeds.items()), file=sys.stderr)
    return results


def fio_command(file, mode, turn, *options):
    """fio with 4 KiB reads of the big file; random ones read an eighth of it, others in each
    round."""
    part = "12%" if mode == "randread" else "100%"
    return ["fio", "--name=bench", "--readonly", f"--filename={file}", f"--rw={mode}", "--bs=4k", "--invalidate=0",
            f"--io_size={part}", f"--randseed={turn + 1}", "--output-format=json", *options]


def fio_speed(output):
    """MiB/s, by what fio prints."""
    return json.loads(output)["jobs"][0]["read"]["bw_bytes"] / 2**20


def base(sides):
    """The side of a test that the others are compared with."""
    return NATIVE if NATIVE in sides else RUNC


def summary(rounds):
    """One line per test."""
    rows = []
    for test, sides in rounds[0].items():
        speeds = [number(median([one[test][side] for one in rounds])) if side in sides else "" for side in (NATIVE, RUNC, *DRIVERS)]
        ratios = [f"{median([one[test][side] / one[test][base(sides)] for one in rounds]):.2f}" for side in DRIVERS]
        rows.append([f"{test} ({UNITS[test]})", *speeds, *ratios])
    return table(["test", NATIVE, RUNC, *DRIVERS, *(f"{side} ÷ {NATIVE}, {RUNC}" for side in DRIVERS)], rows)


def number(value):
    """Three digits or more."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
