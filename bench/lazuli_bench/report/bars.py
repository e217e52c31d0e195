"""Charts of bars and dots, a row for each contender."""

import math

from .palette import own
from .svg import Scale, line, short, svg, text, titles, width_of
from .words import escape, number


def weight(name):
    """The class of a contender's text."""
    return "t label" if own(name) else "t"


def widest(rows, size):
    """How wide the names are."""
    return max(width_of(row[1], size, own(row[0])) for row in rows)


def bar_rows(rows, palette, x0, y0, room, unit, high, row, size, form):
    """Bars from x0 on, the greatest of them `room` long; `rows` is [(name, label, value)]."""
    parts = []
    for index, (name, label, value) in enumerate(rows):
        y = y0 + index * row
        if value is None or not math.isfinite(value):
            parts.append(text(x0 + 5, y + row / 2 + 4, "–" if value is None else "half or more failed", "soft", size - 1))
            continue
        length = max(1.5, room * value / high)
        parts.append(f"<rect x='{x0:.1f}' y='{y + 3:.1f}' width='{length:.1f}' height='{row - 7}'"
                     f" rx='1.5' class='f-{palette.key(name)}'><title>{escape(label)}:"
                     f" {form(value)} {escape(unit)}</title></rect>")
        parts.append(text(x0 + length + 6, y + row / 2 + 4, f"{form(value)} {unit}".strip(), weight(name), size - 0.5))
    return parts + [line(x0, y0, x0, y0 + len(rows) * row - 1, "axis")]


def greatest(values):
    """What the longest bar stands for."""
    return max((value for value in values if value is not None and math.isfinite(value)), default=1) or 1


def bars(rows, palette, title, unit, high=None, form=number):
    """Horizontal bars of [(name, label, value)]. `high`: what the longest one would stand for."""
    x0 = widest(rows, 13) + 10
    high = high or greatest(value for _, _, value in rows)
    parts = bar_rows(rows, palette, x0, 4, 440 - x0 - 74, unit, high, 25, 13, form)
    for index, (name, label, _) in enumerate(rows):
        parts.append(text(x0 - 8, 4 + index * 25 + 17, label, weight(name), 13, "end"))
    return svg(parts, 440, 10 + len(rows) * 25, title)


def twin_bars_picture(rows, palette, panels, heading, foot):
    """A picture of its own: columns of bars that share the names. `rows`: (name, label, values);
    `panels`: (caption, unit, form)."""
    width, row, size, top, gap = 760, 30, 14, 56 + 20 * len(heading), 20
    height = top + len(rows) * row + 34 + 18 * len(foot)
    x0 = 26 + widest(rows, size)
    each = (width - x0 - 16 - gap) / 2
    parts = titles(heading, foot, height)
    for index, (name, label, _) in enumerate(rows):
        parts.append(text(x0 - 8, top + index * row + row / 2 + 5, label, weight(name), size, "end"))
    for panel, (caption, unit, form) in enumerate(panels):
        left, column = x0 + panel * (each + gap), [(name, label, values[panel]) for name, label, values in rows]
        parts.append(text(left, top - 10, caption, "soft"))
        parts += bar_rows(column, palette, left, top, each - 78, unit, greatest(value for _, _, value in column), row, size, form)
    return svg(parts, width, height, heading[0], palette.style())


def dots(rows, palette, title, axis, mark):
    """A dot per image on a logarithmic axis, a bar at the median, and a line at a value to compare
    with.

    `rows`: [(name, label, [(value, what)], median)].
    """
    step, top, width = 27, 8, 440
    left, right, bottom = widest(rows, 13) + 12, width - 14, top + len(rows) * step
    values = [value for _, _, found, _ in rows for value, _ in found if math.isfinite(value)] + [mark]
    x = Scale(min(values) / 1.1, max(values) * 1.1, left, right, log=True)
    parts = []
    for tick in x.ticks(6):
        parts.append(line(x(tick), top, x(tick), bottom, "axis" if tick == mark else "grid"))
        parts.append(text(x(tick), bottom + 17, short(tick), "soft", 12, "middle"))
    parts.append(text(right, bottom + 36, axis, "soft", 12, "end"))
    for index, row in enumerate(rows):
        parts += dot_row(*row, x, top + index * step + step / 2, left, palette.key(row[0]))
    return svg(parts, width, bottom + 44, title)


def dot_row(name, label, found, middle, x, y, left, key):
    """One contender's."""
    parts = [text(left - 10, y + 4.5, label, weight(name), 13, "end")]
    for value, what in found:
        if math.isfinite(value):
            parts.append(f"<circle cx='{x(value):.1f}' cy='{y:.1f}' r='3.6' class='f-{key}'"
                         f" fill-opacity='.45'><title>{escape(label)}: {escape(what)},"
                         f" {number(value)}</title></circle>")
    if math.isfinite(middle):
        parts.append(f"<rect x='{x(middle) - 2:.1f}' y='{y - 10:.1f}' width='4' height='20'"
                     f" class='f-{key}'><title>{escape(label)}: median {number(middle)}</title></rect>")
    return parts
