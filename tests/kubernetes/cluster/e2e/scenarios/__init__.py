"""The scenarios, in order. Each module lists its own in `SCENARIOS`."""

import sys
from dataclasses import dataclass
from typing import Callable

from . import bundle, chart, churn, crowd, disk, installing, nodes, observing, pods, processes, removing, reporting, runtime_class

# The crowd before others, on a node as new as for its overlayfs.
MODULES = (installing, crowd, pods, disk, observing, reporting, churn, processes, nodes, bundle, runtime_class, removing, chart)


@dataclass
class Scenario:
    """A row of the table: a function of the cluster that returns what was seen."""

    name: str
    title: str
    run: Callable
    needs: tuple


def everything():
    """All scenarios by name."""
    found = {}
    for module in MODULES:
        for function, title in module.SCENARIOS:
            name = function.__name__.replace("_", "-")
            found[name] = Scenario(name, title, function, getattr(module, "NEEDS", ("installation",)))
    return found


def choose(names):
    """Those with these names, and what they need; all if there is no name."""
    scenarios = everything()
    unknown = [name for name in names if name not in scenarios]
    if unknown:
        sys.exit(f"run: no such scenario: {', '.join(unknown)}; there are {', '.join(scenarios)}")
    if not names:
        return list(scenarios.values())
    wanted = set(names)
    for name in names:
        wanted.update(scenarios[name].needs)
    return [scenario for name, scenario in scenarios.items() if name in wanted]
