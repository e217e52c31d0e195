"""The results of the scenarios."""

import textwrap
import time
import traceback


class Failed(Exception):
    """A scenario saw what it should not have seen."""


def expect(condition, problem):
    """Fails the scenario with `problem` unless `condition` holds."""
    if not condition:
        raise Failed(problem)


class Table:
    """A row for each scenario."""

    def __init__(self):
        self.rows = []
        self.failed = 0

    def run(self, scenario, cluster):
        """Runs one scenario. The next one runs whatever becomes of it."""
        started = time.monotonic()
        print(f"▸ {scenario.title}", flush=True)
        try:
            seen = scenario.run(cluster)
            passed = True
        except Exception as error:  # noqa: BLE001 - a failed row is a result
            if not isinstance(error, Failed):
                traceback.print_exc()
            passed, seen = False, f"FAILED: {error}"
            self.failed += 1
            cluster.explain()
        print(f"    {seen} ({time.monotonic() - started:.0f} s)", flush=True)
        self.rows.append((scenario.title, seen, passed))
        try:
            cluster.tidy()
        except Exception:  # noqa: BLE001
            traceback.print_exc()

    def text(self):
        """For a terminal."""
        width = max((len(title) for title, _, _ in self.rows), default=0)
        return "\n".join(f"{'ok  ' if passed else 'FAIL'} {title:{width}}  {seen}" for title, seen, passed in self.rows)

    def markdown(self):
        """The rows that passed, for docs/measurements/kubernetes.md."""
        rows = [f"- **{title}**: {seen}" for title, seen, passed in self.rows if passed]
        return "".join(f"{textwrap.fill(row, 100, subsequent_indent='  ')}\n" for row in rows)
