"""Fields that the results of all verbs share."""

import datetime
import json
import re
import shlex
import subprocess

from lab import REPOSITORY, machine


def error_text(error):
    """What an error says, for results that are kept: of paths on this machine only the names."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:\"']+/)+", "", str(error))


def write(path, verb, argv, **fields):
    """Write the result of a verb: what it was asked, when, of which commit, on which machine, and its own fields."""
    head = {"schema": f"lazuli-bench/{verb}/1", "command": shlex.join(["lazuli-bench", verb, *without_json(argv)]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": COMMIT, "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | fields, indent=1) + "\n")


def commit():
    """The benchmark's own, marked if files were changed; None where there is no git repository."""
    asked = subprocess.run(["git", "-C", REPOSITORY, "describe", "--always", "--dirty", "--abbrev=7"], capture_output=True, text=True)
    return asked.stdout.strip() or None


# When the program starts: the repository may change while it measures.
COMMIT = commit()


def without_json(argv):
    """What a verb was asked, but for where it writes to."""
    at = argv.index("--json") if "--json" in argv else len(argv)
    return [*argv[:at], *argv[at + 2:]]
