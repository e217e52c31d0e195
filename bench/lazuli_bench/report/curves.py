"""Charts of curves, labelled directly."""

import math

from .labels import Room, place_all, spread
from .palette import own
from .svg import Scale, curve, leader, line, short, svg, text, titles, width_of
from .words import escape, number


def shares(curves, palette, title, axis, domain=None):
    """Which share is ready by when, one step curve per contender: `curves` is [(name, label,
    [(seconds, what)])].

    Values that are infinite are missing from the curve, which then ends below 100 %.
    """
    parts = share_plot(curves, palette, axis, (53, 14, 430 - 12, 330 - 46), domain, room=0.34, ticks=6)
    return svg(parts, 430, 330, title)


def shares_picture(curves, palette, axis, heading, foot):
    """The same as a picture of its own."""
    width, height = 760, 470
    box = (61, 44 + 20 * len(heading), width - 22, height - 60 - 18 * len(foot))
    parts = titles(heading, foot, height) + share_plot(curves, palette, axis, box, None, room=0.22, ticks=8)
    return svg(parts, width, height, heading[0], palette.style())


def share_plot(curves, palette, axis, box, domain, room, ticks):
    """Grid, curves and names, between left, top, right and bottom. `room`: how much there is for
    the names of the fastest."""
    left, top, right, bottom = box
    finite = [value for _, _, values in curves for value, _ in values if math.isfinite(value)]
    low, high = domain or (min(finite), max(finite))
    x = Scale(low / max(1.3, (high / low) ** room), high * 1.2, left, right, log=True)
    y = Scale(0, 1, bottom, top)
    parts = share_grid(x, y, box, axis, ticks)
    drawn = []
    for name, label, values in curves:
        steps = [(value, (index + 1) / len(values), what) for index, (value, what) in enumerate(sorted(values))
                 if math.isfinite(value)]
        if steps:
            drawn.append((name, label, steps, step_points(x, y, steps, right)))
    # Lazuli's curves last, so that they are on top.
    parts += [curve(points, palette.key(name), label, own(name))
              for name, label, _, points in sorted(drawn, key=lambda entry: own(entry[0]))]
    parts += names_beside(drawn, palette, Room(left + 2, top - 6, right, bottom - 3))
    for name, label, steps, _ in drawn:
        parts += [f"<circle cx='{x(value):.1f}' cy='{y(share):.1f}' r='4' class='hit f-{palette.key(name)}'>"
                  f"<title>{escape(label)}: {escape(what)}, {number(value)} s</title></circle>" for value, share, what in steps]
    return parts


def share_grid(x, y, box, axis, ticks):
    """Lines and numbers behind the curves."""
    left, top, right, bottom = box
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(line(left, y(share), right, y(share), "axis" if share == 0 else "grid"))
        parts.append(text(left - 7, y(share) + 4, f"{share * 100:.0f} %", "soft", 13, "end"))
    for tick in x.ticks(ticks):
        parts.append(line(x(tick), bottom, x(tick), bottom + 4, "axis"))
        parts.append(line(x(tick), top, x(tick), bottom, "grid"))
        parts.append(text(x(tick), bottom + 18, short(tick), "soft", 13, "middle"))
    return parts + [text(right, bottom + 36, axis, "soft", 13, "end")]


def step_points(x, y, steps, right):
    """The corners of a curve; one that reaches 100 % goes on to the right."""
    points, share = [], 0
    for value, after, _ in steps:
        points += [(x(value), y(share)), (x(value), y(after))]
        share = after
    return points + ([(right, y(1))] if share == 1 else [])


def names_beside(drawn, palette, room):
    """The names of curves, and lines to those that are far."""
    for name, _, _, points in drawn:
        room.occupy(name, points)
    labels, leads = [], []
    found = place_all(room, [(name, label, points) for name, label, _, points in drawn], 14)
    label_of = {name: label for name, label, _, _ in drawn}
    for name, (_, x, y, side, anchor) in found.items():
        key = palette.key(name)
        if abs(x - anchor[0]) > 8:
            leads.append(leader(*anchor, x - side * 3, y, key))
        labels.append(text(x, y + 14 * 0.36, label_of[name], f"halo label f-{key}", 14, "start" if side > 0 else "end"))
    return leads + labels


def lines(series, palette, title, below, above, height=300, unit="s"):
    """Lines over numbers, with their names at the right end. `series`: [(name, label, [(x,
    y)])]."""
    plot = LinePlot(series, palette, 440, height, unit)
    plot.scale(0, plot.greatest() * 1.06)
    parts = plot.frame(above)
    last = -100
    for value in plot.positions:
        if plot.x(value) - last > width_of(short(value), 13) + 8:
            parts.append(text(plot.x(value), plot.bottom + 17, short(value), "soft", 12, "middle"))
            last = plot.x(value)
        parts.append(plot.tick(value))
    parts.append(text((plot.left + plot.right) / 2, plot.bottom + 37, below, "soft", 12, "middle"))
    return svg(parts + plot.curves(short), 440, height, title)


def lines_by_name(series, palette, title, above, names):
    """Lines over things with names, with a logarithmic axis. `series`: [(name, label, [(index of
    the thing, y)])]."""
    plot = LinePlot(series, palette, 460, 330 + 14, "s")
    plot.scale(plot.least() / 1.2, plot.greatest() * 1.2, log=True)
    parts = plot.frame(above)
    for value in plot.positions:
        first, _, second = names[value].partition(", ")
        ends = {plot.positions[-1]: ("end", 10), plot.positions[0]: ("start", -10)}
        anchor, aside = ends.get(value, ("middle", 0)) if len(plot.positions) > 1 else ("middle", 0)
        at = plot.x(value) + aside
        parts.append(text(at, plot.bottom + 17, first, "soft", 11.5, anchor))
        parts.append(text(at, plot.bottom + 31, second, "soft", 11.5, anchor))
        parts.append(plot.tick(value))
    return svg(parts + plot.curves(names.__getitem__), 460, 330, title)


class LinePlot:
    """Lines in a frame. Values that are infinite are missing from them."""

    def __init__(self, series, palette, width, height, unit):
        finite = [(name, label, sorted(point for point in points if math.isfinite(point[1]))) for name, label, points in series]
        self.series = [entry for entry in finite if entry[2]]
        self.palette, self.unit = palette, unit
        self.left, self.top, self.bottom = 48, 30, height - 48
        self.right = width - max(width_of(label, 13, True) for _, label, _ in self.series) - 16
        self.positions = sorted({x for _, _, points in self.series for x, _ in points})
        self.x = Scale(self.positions[0], self.positions[-1], self.left + 8, self.right - 8)

    def least(self):
        """The least value."""
        return min(y for _, _, points in self.series for _, y in points)

    def greatest(self):
        """The greatest value."""
        return max(y for _, _, points in self.series for _, y in points)

    def scale(self, low, high, log=False):
        """The values that the frame has room for."""
        self.y = Scale(low, high, self.bottom, self.top, log=log)

    def frame(self, above):
        """The axes, but for what is below them."""
        parts = [text(4, 15, above, "soft", 12)]
        for tick in self.y.ticks(6):
            parts.append(line(self.left, self.y(tick), self.right, self.y(tick), "grid"))
            parts.append(text(self.left - 7, self.y(tick) + 4, short(tick), "soft", 12, "end"))
        return parts + [line(self.left, self.bottom, self.right, self.bottom, "axis")]

    def tick(self, value):
        """A mark at the axis below."""
        return line(self.x(value), self.bottom, self.x(value), self.bottom + 4, "axis")

    def curves(self, where):
        """The lines, Lazuli's on top, and their names. `where`: the name of a position."""
        parts = []
        for name, label, points in sorted(self.series, key=lambda entry: own(entry[0])):
            key = self.palette.key(name)
            parts.append(curve([(self.x(x), self.y(y)) for x, y in points], key, label, own(name)))
            parts += [f"<circle cx='{self.x(x):.1f}' cy='{self.y(y):.1f}' r='3.2' class='f-{key}'><title>{escape(label)},"
                      f" {escape(where(x))}: {number(y)} {self.unit}</title></circle>" for x, y in points]
        ends = sorted((self.y(points[-1][1]), self.x(points[-1][0]), name, label) for name, label, points in self.series)
        heights = spread([end[0] for end in ends], 16, self.top, self.bottom)
        for (y, x, name, label), height in zip(ends, heights):
            key = self.palette.key(name)
            parts.append(leader(x + 5, y, self.right + 4, height, key))
            parts.append(text(self.right + 8, height + 4.5, label, f"label f-{key}"))
        return parts
