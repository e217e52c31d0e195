"""A Debian 13 whose programs run on this machine."""

from lab import run


def make(work, packages):
    """Make the system, of these packages."""
    system = work / "system"
    run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "trixie", system)
    return system


def lay_over(work):
    """Lay the system's /usr over the machine's, for this mount namespace: its programs and their
    libraries come first."""
    options = f"lowerdir={work}/system/usr:/usr"
    run("mount", "-t", "overlay", "-o", options, "overlay", "/usr")
