"""Figures computed from a result of lazuli-bench/hello/1."""

import math
import statistics

from .palette import BASELINE, PULLED_WHOLE, own
from .words import median

CATEGORIES = {"distro": "Distributions", "database": "Databases", "language": "Languages",
              "web-server": "Web servers", "web-framework": "Web frameworks", "application": "Applications", "other": "Other"}

# What is never ready takes so long.
INFINITE = math.inf


class Hello:
    """The result by shape (a network's name), contender (its name) and image."""

    def __init__(self, result):
        self.result, self.images = result, result["images"]
        self.shapes = {shape["name"]: shape for shape in result["shapes"]}
        self.contenders = [contender["name"] for contender in result["contenders"]]
        self.title = {contender["name"]: contender["title"] for contender in result["contenders"]}
        self.own = [name for name in self.contenders if own(name)]
        self.others = [name for name in self.contenders if not own(name)]
        self.lazuli = self.own[0] if self.own else None
        self.lazy = [name for name in self.contenders if name not in PULLED_WHOLE]
        self.order = sorted(self.images, key=lambda image: (list(CATEGORIES).index(self.category(image)), image))
        self.starts, self.errors = sorted_out(result["starts"])
        self.pushes, self.push_errors = sorted_out(result["pushes"])
        self.round_trips = result.get("round_trips", 4)
        self.warm = {}
        for start in result["warm"]:
            self.warm.setdefault(start["image"], []).append(start["seconds"])
        self.reference = next((name for name, shape in self.shapes.items()
                               if (shape["round_trip_ms"], shape["megabits"]) == (20, 1000)), next(iter(self.shapes)))

    def category(self, image):
        """An image's."""
        return self.images[image]["category"]

    def values(self, field, shape, contender, image):
        """Of all rounds that worked."""
        return [start[field] for start in self.starts.get((shape, contender, image), [])]

    def ready(self, shape, contender, image):
        """Median seconds of the deployment cycle: infinite when all of its starts failed, None when
        there is none."""
        key = shape, contender, image
        if key in self.starts:
            return median(self.values("ready_s", *key))
        return INFINITE if key in self.errors else None

    def developed(self, shape, contender, image):
        """The same with the push before it, where it was measured. After a push that failed there
        are no starts."""
        key = shape, contender, image
        if key in self.push_errors:
            return INFINITE
        ready = self.ready(*key)
        if ready is None or key not in self.pushes:
            return None
        return ready + median(push["seconds"] for push in self.pushes[key])

    def push_error(self, contender, image):
        """Why there is no start of a contender's image on any network, or nothing."""
        return next((error for (_, *key), errors in self.push_errors.items() if key == [contender, image] for error in errors), None)

    def cycle(self, kind, shape, contender, image):
        """Seconds of a deployment or development cycle."""
        return (self.ready if kind == "deployment" else self.developed)(shape, contender, image)

    def cycles(self, kind, shape, contender):
        """[(seconds, image)] of all images that were tried."""
        pairs = [(self.cycle(kind, shape, contender, image), image) for image in self.order]
        return [pair for pair in pairs if pair[0] is not None]

    def middle(self, kind, shape, contender):
        """Within how many seconds half of the images are ready."""
        return median(value for value, _ in self.cycles(kind, shape, contender))

    def middle_of_category(self, category, shape, contender):
        """The same of a category's, for the deployment cycle."""
        return median(value for value, image in self.cycles("deployment", shape, contender) if self.category(image) == category)

    def by_speed(self, kind, shape):
        """The contenders that were tried, the soonest first."""
        middle = {name: self.middle(kind, shape, name) for name in self.contenders}
        return sorted((name for name in self.contenders if middle[name] is not None), key=middle.get)

    def ratios(self, kind, shape, contender):
        """Baseline ÷ contender, of images that both start."""
        pairs = [[self.cycle(kind, shape, name, image) for name in (BASELINE, contender)] for image in self.order]
        return [theirs / ours for theirs, ours in pairs
                if None not in (theirs, ours) and math.isfinite(theirs) and math.isfinite(ours)]

    def wins(self, shape, candidates):
        """On how many images the best candidate is ready before every contender that is not Lazuli,
        and of how many."""
        won = count = 0
        for image in self.order:
            ours, theirs = ([value for value in (self.ready(shape, name, image) for name in names) if value is not None]
                            for names in (candidates, self.others))
            if ours and theirs:
                count += 1
                won += min(ours) < min(theirs)
        return won, count

    def bound(self, shape, image):
        """The least that a start over this network can take; None when no lazy contender starts
        it."""
        fetched = [size for name in self.lazy for size in self.values("bytes", shape, name, image)]
        if not fetched:
            return None
        megabits = self.shapes[shape]["megabits"]
        return (median(self.warm[image]) + self.small_pull() + (min(fetched) / (megabits * 1e6 / 8) if megabits else 0)
                + self.round_trips * self.shapes[shape]["round_trip_ms"] / 1000)

    def small_pull(self):
        """Median seconds in which containerd pulls busybox, 1 MB, over loopback; 0 where that was
        not measured."""
        near = [name for name, shape in self.shapes.items() if not shape["megabits"]]
        return median(value for name in near for value in self.values("pull_s", name, BASELINE, "busybox")) or 0

    def above_bound(self, shape, contender):
        """[(ready ÷ bound, image)]"""
        found = [(self.ready(shape, contender, image), self.bound(shape, image), image) for image in self.order]
        return [(ready / bound, image) for ready, bound, image in found if ready is not None and bound is not None]

    def typical(self, field, shape, contender):
        """Median over images of the median over rounds, of starts that worked."""
        return median(median(values) for values in
                      (self.values(field, shape, contender, image) for image in self.order) if values)

    def starts_of(self, shape, contender):
        """All of a contender's that worked."""
        return [start for image in self.order for start in self.starts.get((shape, contender, image), [])]

    def pushed_bytes(self, shape, contender):
        """Median of what a contender's images take in the registry."""
        return median(push["bytes"] for key, pushes in self.pushes.items() if key[:2] == (shape, contender) for push in pushes)

    def rounds(self):
        """How often everything was started."""
        return max(len(starts) for starts in self.starts.values())

    def spreads(self):
        """(slowest − fastest) ÷ median, of everything that was started more than once, in ascending
        order."""
        times = [[start["ready_s"] for start in starts] for starts in self.starts.values()]
        return sorted((max(values) - min(values)) / statistics.median(values) for values in times if len(values) > 1)


def sorted_out(entries):
    """What worked, and the errors of what did not, both by shape, contender and image."""
    worked, errors = {}, {}
    for entry in entries:
        key = entry["shape"], entry["contender"], entry["image"]
        if "error" in entry:
            errors.setdefault(key, []).append(entry["error"])
        else:
            worked.setdefault(key, []).append(entry)
    return worked, errors
