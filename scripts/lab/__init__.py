"""Shared by demos, benchmarks and compatibility tests: processes, scratch, mounts, caches."""

import contextlib
import os
import secrets
import shutil
import signal
import statistics
import string
import subprocess
import sys
import textwrap
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# Debian keeps runc and mkfs.erofs where an ordinary user's PATH does not look.
os.environ["PATH"] += ":/usr/sbin:/sbin"


class CommandFailed(Exception):
    """A command ended with a status other than 0; the message ends with what it printed."""

    def __init__(self, command, status, output):
        tail = "\n".join(output.decode(errors="replace").splitlines()[-15:])
        super().__init__(f"{' '.join(map(str, command))}: exit status {status}\n{tail}".rstrip())


def run(*command, **options):
    """Run a command and return its standard output; what it prints to stderr shows only if it
    fails."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, **pipes, **options) as process:
        try:
            output, complaints = process.communicate()
        finally:
            # Where this process is asked to end, the command has to, too, with time to clean up.
            end(process)
    if process.returncode:
        raise CommandFailed(command, process.returncode, output + complaints)
    return output


def need_root():
    """End here unless root: mounts, containers and the page cache are root's."""
    if os.geteuid():
        sys.exit(f"{Path(sys.argv[0]).name}: must run as root (mounts, runc, page cache)")


@contextlib.contextmanager
def scratch(name):
    """A directory on a disk file system (not /tmp, which may be a tmpfs: fanotify and overlayfs
    upper directories do not work there). SIGTERM and SIGHUP unwind like Ctrl-C, so that mounts,
    daemons and this directory go away."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    # Not mkdtemp: containerd refuses some of its names as the names of namespaces.
    directory = Path(f"/var/tmp/lazuli-{name}-{secrets.token_hex(4)}")
    directory.mkdir()
    directory.chmod(0o755)
    try:
        yield directory
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if unmount_below(directory):
            print(f"{name}: unmounted what was left below {directory}", file=sys.stderr)
        shutil.rmtree(directory, ignore_errors=True)


def unmount_below(directory):
    """Unmount everything mounted below a directory, newest first; return the mount points."""
    with open("/proc/self/mountinfo") as table:
        points = [line.split()[4].encode().decode("unicode_escape") for line in table]
    points = [point for point in reversed(points) if Path(point).is_relative_to(directory)]
    for point in points:
        subprocess.run(["umount", "--lazy", point], check=False, stderr=subprocess.DEVNULL)
    return points


@contextlib.contextmanager
def background(*command, log, ready, timeout=30, **options):
    """A process in a session of its own (Ctrl-C is for us, not for it) from when `ready()` is true
    until the end of the block."""
    with open(log, "ab") as output:
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=output, start_new_session=True, **options)
    try:
        wait_until(lambda: ready() or process.poll() is not None, timeout, command[0])
        if process.poll() is not None:
            raise CommandFailed(command, process.returncode, Path(log).read_bytes())
        yield process
    finally:
        end(process)


def used(processes):
    """Processor seconds that processes have used, with those children that they have waited for."""
    ticks = 0
    for process in processes:
        # Behind the name, which may have spaces and parentheses: utime, stime, cutime, cstime are
        # fields 14 to 17.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def end(process):
    """Have a process end, with time to clean up."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(condition, timeout, subject):
    """Poll a condition every 10 ms."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{subject}: not ready after {timeout} s")
        time.sleep(0.01)


def drop_caches():
    """Forget every clean page, dentry and inode of the machine."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@contextlib.contextmanager
def fair_scheduling():
    """Without autogroups, which would give each session (ours, a daemon's) an equal share of the
    CPU whatever it holds: everything of a comparison competes as it would in production."""
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if not switch.exists():
        yield
        return
    before = switch.read_text()
    switch.write_text("0")
    try:
        yield
    finally:
        switch.write_text(before)


def corpus(*names):
    """The directory of the corpus, with these images in it; builds those that are missing."""
    print(f"corpus: {', '.join(names)}", file=sys.stderr)
    command = [REPOSITORY / "scripts/corpus", *names]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def machine():
    """What a measurement depends on besides the code."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"kernel": os.uname().release, "cpus": os.cpu_count(), "memory_gib": round(memory / 2**30, 1),
            "load": os.getloadavg()[0]}


def median(values):
    """The median of a non-empty sequence."""
    return statistics.median(values)


# Documents have no wider lines (CONTRIBUTING.md).
COLUMNS = 100


def table(header, rows):
    """A Markdown table of at most COLUMNS columns, if its cells allow it.

    All columns but the first are right-aligned. The first of these forms that fits is taken:
    columns that line up, cells without padding, rows and columns exchanged, and letters for
    headings, which the text above the table explains.
    """
    cells = [list(map(str, row)) for row in (header, *rows)]
    exchanged = list(map(list, zip(*cells)))
    letters = string.ascii_lowercase[:len(header) - 1]
    meanings = "; ".join(f"*{letter}*: {heading}" for letter, heading in zip(letters, cells[0][1:]))
    lettered = [[cells[0][0], *letters], *cells[1:]]
    forms = [aligned(cells), compact(cells)]
    if len(header) > 3 and len(cells) <= 8:
        forms.append(compact(exchanged))
    fits = (form for form in forms if max(map(len, form.splitlines())) <= COLUMNS)
    return next(fits, None) or f"{textwrap.fill(meanings, COLUMNS)}\n\n{compact(lettered)}"


def aligned(cells):
    """Rows of cells as a table whose columns line up."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    rule = [":" + "-" * (width - 1) if not i else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    def line(row):
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        return f"| {' | '.join(padded)} |"
    return "\n".join(map(line, (cells[0], rule, *cells[1:])))


def compact(cells):
    """Rows of cells as a table without padding."""
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|:--" + "|--:" * (len(cells[0]) - 1) + "|", *lines[1:]])


def megabytes(count):
    """Bytes as decimal megabytes, as registries and disks count."""
    return f"{count / 1e6:.1f}" if count < 99.95e6 else f"{count / 1e6:.0f}"
