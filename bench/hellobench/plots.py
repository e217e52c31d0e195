"""SVG pictures from numbers: curves, bars, strips and lines, labelled directly.

Every function returns one <svg> element as text. Colours are classes (`s-KEY` strokes, `f-KEY`
fills), so that one style sheet serves light and dark, in a page and in a picture of its own.
"""

import html
import math

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"

# What a figure is made of, on a light and on a dark ground.
GROUND = {"bg": ("#ffffff", "#0d1117"), "ink": ("#1c2330", "#e3e8ef"),
          "soft": ("#5a6472", "#9aa5b3"), "grid": ("#e3e6eb", "#262d37"),
          "axis": ("#a9b0ba", "#55606e")}

# Blues are Lazuli's, greys belong to systems that pull whole images, warm tones to the other lazy
# ones. Neighbours differ in lightness and in dashes too.
LAZULI = [("#1d3fb8", "#7fa2ff", ""), ("#4580dd", "#5585ea", "6 3"), ("#0b1f5e", "#c2d2ff", "2 3"),
          ("#3f6f9f", "#7fb0d6", "9 3 2 3")]
WHOLE = [("#565e6b", "#8e98a6", ""), ("#857f73", "#c2bdae", "7 3"), ("#4a4d52", "#a3a7ae", "3 3")]
LAZY = [("#a96a1c", "#dba14e", ""), ("#8d3f30", "#d0776a", "8 3"), ("#a58b78", "#c9b09c", "3 3"),
        ("#7a5a6e", "#b791a9", "8 3 2 3"), ("#8a7a1f", "#c4b24f", "5 2")]


class Palette:
    """Colour and dashes of every contender, by name."""

    def __init__(self):
        self.of, self.titles = {}, {}
        self.used = {"lazuli": 0, "whole": 0, "lazy": 0}

    def add(self, name, kind):
        if name not in self.of:
            colours = {"lazuli": LAZULI, "whole": WHOLE, "lazy": LAZY}[kind]
            self.of[name] = colours[self.used[kind] % len(colours)] + (f"k{len(self.of)}",)
            self.used[kind] += 1

    def title(self, name):
        return self.titles.get(name, name)

    def key(self, name):
        return self.of[name][3]

    def style(self):
        """The rules of all classes, dark ones in a media query; paper is white."""
        def rules(which):
            ground = {name: pair[which] for name, pair in GROUND.items()}
            lines = [f".t{{fill:{ground['ink']}}}.soft{{fill:{ground['soft']}}}",
                     f".halo{{stroke:{ground['bg']}}}.grid{{stroke:{ground['grid']}}}",
                     f".axis{{stroke:{ground['axis']}}}.ground{{fill:{ground['bg']}}}",
                     f".edge{{stroke:{ground['grid']}}}"]
            lines += [f".s-{entry[3]}{{stroke:{entry[which]}}}.f-{entry[3]}{{fill:{entry[which]}}}"
                      for entry in self.of.values()]
            return "".join(lines)

        dashes = "".join(f".s-{entry[3]}{{stroke-dasharray:{entry[2]}}}"
                         for entry in self.of.values() if entry[2])
        return (f"{rules(0)}{dashes}"
                ".label{font-weight:600}.halo{paint-order:stroke;stroke-width:4;"
                "stroke-linejoin:round;stroke-dasharray:none}.curve{fill:none;stroke-width:2;stroke-linejoin:round;"
                "stroke-linecap:butt}.own{stroke-width:2.8}.hit{fill-opacity:0}"
                ".hit:hover{fill-opacity:1}.lead{fill:none;stroke-width:1;stroke-dasharray:none;"
                "stroke-opacity:.7}.grid,.axis{stroke-width:1;fill:none}"
                f"@media screen and (prefers-color-scheme:dark){{{rules(1)}}}")


def escape(text):
    return html.escape(str(text), quote=True)


def number(value):
    """Three digits or so, for people."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.00995 or size == 0:
        return f"{value:.2f}" if size else "0"
    return f"{value:.1g}"


def short(value):
    """A tick's label."""
    return f"{value:,.0f}" if value >= 1 and value == int(value) else f"{value:g}"


def width_of(text, size, bold=False):
    """An estimate from above, for fonts that are not known."""
    return (1.13 if bold else 1) * sum(0.34 if letter in "iljt.,:;|'!()[] fr" else 0.9 if letter in "mwMW" else
               0.68 if letter.isupper() else 0.585 for letter in str(text)) * size


def text(x, y, content, classes="t", size=13, anchor="start", extra=""):
    return (f"<text x='{x:.1f}' y='{y:.1f}' class='{classes}' font-size='{size}'"
            f" text-anchor='{anchor}' {extra}>{escape(content)}</text>")


def haloed(x, y, content, classes="t", size=13, anchor="start"):
    return text(x, y, content, f"halo {classes}", size, anchor)


def line(x1, y1, x2, y2, classes):
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' class='{classes}'/>"


def svg(parts, width, height, title, style=None, margin=0):
    """`style`: makes a picture of its own, with a ground and its own style sheet."""
    body = "".join(parts)
    head = (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}'"
            f" width='{width}' height='{height}' role='img' aria-label='{escape(title)}'"
            f" font-family=\"{FONT}\">")
    if style is None:
        return f"{head}{body}</svg>"
    return (f"{head}<title>{escape(title)}</title><style>{style}</style>"
            f"<rect x='.5' y='.5' width='{width - 1}' height='{height - 1}' rx='6'"
            f" class='ground edge'/>{body}</svg>\n")


class Scale:
    """From values to pixels, straight or logarithmic."""

    def __init__(self, low, high, start, end, log=False):
        if log:
            low, high = max(low, 1e-9), max(high, 1e-9)
            if high <= low * 1.05:
                low, high = low / 1.5, high * 1.5
        elif high <= low:
            high = low + 1
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value):
        if self.log:
            share = math.log(max(value, 1e-9) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most=7):
        if not self.log:
            step = 10 ** math.floor(math.log10((self.high - self.low) / most))
            step *= next(factor for factor in (1, 2, 5, 10) if
                         (self.high - self.low) / (step * factor) <= most)
            first = math.ceil(self.low / step - 1e-9)
            return [round(index * step, 10) for index in
                    range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        best = []
        for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            ticks = [factor * 10 ** decade for decade in decades for factor in factors
                     if self.low * 0.999 <= factor * 10 ** decade <= self.high * 1.001]
            ticks = [float(f"{tick:.3g}") for tick in ticks]
            if len(ticks) > most and len(best) >= 2:
                break
            best = ticks
        return best


CELL = 5


class Room:
    """Which cells of a plot curves and labels occupy, for placing labels where nothing is."""

    def __init__(self, box):
        self.box, self.cells, self.labels = box, {}, []

    def occupy(self, owner, points):
        for (x1, y1), (x2, y2) in zip(points, points[1:]):
            steps = max(1, int(max(abs(x2 - x1), abs(y2 - y1)) / 3))
            for index in range(steps + 1):
                share = index / steps
                cell = (int((x1 + (x2 - x1) * share) // CELL), int((y1 + (y2 - y1) * share) // CELL))
                self.cells.setdefault(cell, set()).add(owner)

    def cost(self, owner, left, top, right, bottom):
        """None: impossible. Else what is covered."""
        x0, y0, x1, y1 = self.box
        if left < x0 or right > x1 or top < y0 or bottom > y1:
            return None
        if any(left < r + 4 and right > l - 4 and top < b + 1 and bottom > t - 1
               for l, t, r, b in self.labels):
            return None
        covered = 0
        for column in range(int(left // CELL), int(right // CELL) + 1):
            for row in range(int(top // CELL), int(bottom // CELL) + 1):
                covered += len(self.cells.get((column, row), ()))
        return covered

    def crossed(self, owner, x1, y1, x2, y2):
        steps = max(2, int(max(abs(x2 - x1), abs(y2 - y1)) / 3))
        owners, labels = set(), 0
        for index in range(1, steps + 1):
            x, y = x1 + (x2 - x1) * index / steps, y1 + (y2 - y1) * index / steps
            owners |= self.cells.get((int(x // CELL), int(y // CELL)), set())
            labels += any(l <= x <= r and t <= y <= b for l, t, r, b in self.labels)
        return len(owners - {owner}), labels


def place(room, owner, points, content, size):
    """Finds a label's place near the curve: x, y of the text, its anchor, and the leader."""
    wide, high = width_of(content, size, True), size * 1.15
    best = None
    vertical = [(a, b) for a, b in zip(points, points[1:]) if abs(b[1] - a[1]) > 0.5]
    anchors = []
    for (x1, y1), (x2, y2) in vertical:
        anchors.append(((x1 + x2) / 2, (y1 + y2) / 2))
    anchors = anchors[::max(1, len(anchors) // 22)] or points[:1]
    for ax, ay in anchors:
        for side in (1, -1):
            for gap in (6, 16, 30, 50, 75, 105, 140, 180):
                for dy in (0, 9, -9, 20, -20, 36, -36):
                    if dy and gap < 16:
                        continue
                    least = gap * 0.35 + abs(dy) * 0.3
                    if best is not None and least >= best[0]:
                        continue
                    near = ax + side * gap
                    left = near if side > 0 else near - wide
                    top = ay + dy - high / 2
                    covered = room.cost(owner, left - 2, top, left + wide + 2, top + high)
                    if covered is None:
                        continue
                    others, labels = room.crossed(owner, ax, ay, near - side * 3, ay + dy)
                    cost = covered * 16 + others * 26 + labels * 200 + least
                    if best is None or cost < best[0]:
                        best = (cost, near, ay + dy, side, (ax, ay), (left, top, left + wide, top + high))
    if best is None:
        return None
    room.labels.append(best[5])
    return best


def cdf(curves, palette, title, xlabel, width=430, height=330, style=None, heading=(), foot=(),
        size=14, domain=None):
    """One step curve per contender: `curves` is [(name, label, [(seconds, what)], of how many)].

    Values that are infinite are missing from the curve, which then ends below 100 %.
    """
    left, right = 53 + (8 if style else 0), width - 12 - (10 if style else 0)
    top = 14 + (30 + 20 * len(heading) if style else 0)
    bottom = height - 46 - (18 * len(foot) + 14 if style else 0)
    parts = titles(heading, foot, height) if style else []
    finite = [value for _, _, values, _ in curves for value, _ in values if math.isfinite(value)]
    low, high = domain or (min(finite, default=0.1), max(finite, default=1))
    # Room at the left, for the names of the fastest.
    x = Scale(low / max(1.3, (high / low) ** (0.34 if width < 500 else 0.22)), high * 1.2, left, right, log=True)
    y = Scale(0, 1, bottom, top)
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(line(left, y(share), right, y(share), "axis" if share == 0 else "grid"))
        parts.append(text(left - 7, y(share) + 4, f"{share * 100:.0f} %", "soft", size - 1, "end"))
    for tick in x.ticks(8 if width > 500 else 6):
        parts.append(line(x(tick), bottom, x(tick), bottom + 4, "axis"))
        parts.append(line(x(tick), top, x(tick), bottom, "grid"))
        parts.append(text(x(tick), bottom + 18, short(tick), "soft", size - 1, "middle"))
    parts.append(text(right, bottom + 36, xlabel, "soft", size - 1, "end"))
    room = Room((left + 2, top - 6, right, bottom - 3))
    drawn = []
    for name, label, values, count in curves:
        values = sorted((value, what) for value, what in values if math.isfinite(value))
        points, share = [], 0
        for index, (value, _) in enumerate(values):
            points.append((x(value), y(share)))
            share = (index + 1) / count
            points.append((x(value), y(share)))
        if points:
            if share >= 0.999:
                points.append((right, y(1)))
            room.occupy(name, points)
            drawn.append((name, label, points, values, count))
    # Lazuli's curves last, so that they are on top.
    for name, label, points, values, count in sorted(drawn, key=lambda entry: own(entry[0])):
        key = palette.key(name)
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f"<polyline points='{path}' class='curve s-{key}{' own' if own(name) else ''}'>"
                     f"<title>{escape(label)}</title></polyline>")
    # Which name is placed first matters, so several orders are tried.
    orders = [sorted(drawn, key=lambda entry: -len(entry[1])), sorted(drawn, key=lambda entry: entry[2][0]),
              sorted(drawn, key=lambda entry: entry[2][0], reverse=True), drawn]
    tried = []
    for order in orders:
        room.labels = []
        found = [(entry[0], entry[1], place(room, entry[0], entry[2], entry[1], size)) for entry in order]
        tried.append((sum(spot[0] if spot else 1000 for _, _, spot in found), found))
    labels, leads = [], []
    for name, label, spot in min(tried, key=lambda entry: entry[0])[1] if drawn else []:
        if spot is None:
            continue
        key = palette.key(name)
        _, near, cy, side, anchor, _ = spot
        if abs(near - anchor[0]) > 8:
            leads.append(f"<polyline points='{anchor[0]:.1f},{anchor[1]:.1f} {near - side * 3:.1f},"
                         f"{cy:.1f}' class='lead s-{key}' style='stroke-dasharray:none'/>")
        labels.append(haloed(near, cy + size * 0.36, label, f"label f-{key}", size,
                             "start" if side > 0 else "end"))
    parts += leads + labels
    for name, label, points, values, count in drawn:
        for index, (value, what) in enumerate(values):
            parts.append(f"<circle cx='{x(value):.1f}' cy='{y((index + 1) / count):.1f}' r='4'"
                         f" class='hit f-{palette.key(name)}'><title>{escape(label)}: {escape(what)},"
                         f" {number(value)} s</title></circle>")
    return svg(parts, width, height, title, style)


def own(name):
    return name.startswith("lazuli")


def titles(heading, foot, height):
    parts = [text(20, 30 + 20 * index, content, "t" if index == 0 else "soft",
                  16 if index == 0 else 13, extra="font-weight='600'" if index == 0 else "")
             for index, content in enumerate(heading)]
    parts += [text(20, height - 16 - 18 * (len(foot) - 1 - index), content, "soft", 12)
              for index, content in enumerate(foot)]
    return parts


def bar_rows(rows, palette, x0, width, top, unit, high=None, row=25, size=13, room=64, form=number):
    """Bars from x0 on; `rows` is [(name, label, value or None, note)]."""
    parts = []
    values = [value for _, _, value, _ in rows if value is not None and math.isfinite(value)]
    high = high or max(values, default=1) or 1
    for index, (name, label, value, note) in enumerate(rows):
        y = top + index * row
        if value is None or not math.isfinite(value):
            parts.append(text(x0 + 5, y + row / 2 + 4, note or "–", "soft", size - 1))
            continue
        length = max(1.5, (width - room) * value / high)
        parts.append(f"<rect x='{x0:.1f}' y='{y + 3:.1f}' width='{length:.1f}' height='{row - 7}'"
                     f" rx='1.5' class='f-{palette.key(name)}'><title>{escape(label)}:"
                     f" {form(value)} {escape(unit)}{escape(', ' + note if note else '')}</title></rect>")
        parts.append(text(x0 + length + 6, y + row / 2 + 4, f"{form(value)} {unit}".strip(),
                          "t" + (" label" if own(name) else ""), size - 0.5))
    parts.append(line(x0, top, x0, top + len(rows) * row - 1, "axis"))
    return parts


def bars(rows, palette, title, unit, high=None, width=440, size=13, form=number):
    """Horizontal bars with the contenders' names at the left."""
    x0 = max(width_of(label, size, own(name)) for name, label, _, _ in rows) + 10
    parts = bar_rows(rows, palette, x0, width - x0, 4, unit, high, size=size, room=74, form=form)
    for index, (name, label, _, _) in enumerate(rows):
        parts.append(text(x0 - 8, 4 + index * 25 + 17, label, "t" + (" label" if own(name) else ""),
                          size, "end"))
    return svg(parts, width, 10 + len(rows) * 25, title)


def twin_bars(rows, palette, title, panels, style, heading, foot, width=760):
    """The README's: two columns of bars that share the names. `rows`: (name, label, values)."""
    row, size, top = 30, 14, 30 + 20 * len(heading) + 26
    height = top + len(rows) * row + 34 + 18 * len(foot)
    x0 = 26 + max(width_of(label, size, own(name)) for name, label, _ in rows)
    gap = 20
    each = (width - x0 - 16 - gap) / 2
    parts = titles(heading, foot, height)
    for index, (name, label, _) in enumerate(rows):
        parts.append(text(x0 - 8, top + index * row + row / 2 + 5, label,
                          "t" + (" label" if own(name) else ""), size, "end"))
    for panel, (caption, unit, form) in enumerate(panels):
        left = x0 + panel * (each + gap)
        parts.append(text(left, top - 10, caption, "soft", 13))
        parts += bar_rows([(name, label, values[panel], "") for name, label, values in rows],
                          palette, left, each, top, unit, row=row, size=size, room=78, form=form)
    return svg(parts, width, height, title, style)


def strip(rows, palette, title, xlabel, mark=None, width=440, size=13):
    """One row per contender, a dot per image on a log axis, a bar at the median.

    `rows`: [(name, label, [(value, what)], median)].
    """
    step, top = 27, 8
    left = max(width_of(label, size, own(name)) for name, label, _, _ in rows) + 12
    bottom, right = top + len(rows) * step, width - 14
    height = bottom + 44
    values = [value for _, _, dots, _ in rows for value, _ in dots if math.isfinite(value)]
    if mark is not None:
        values.append(mark)
    x = Scale(min(values, default=1) / 1.1, max(values, default=10) * 1.1, left, right, log=True)
    parts = []
    for tick in x.ticks(6):
        parts.append(line(x(tick), top, x(tick), bottom, "axis" if tick == mark else "grid"))
        parts.append(text(x(tick), bottom + 17, short(tick), "soft", size - 1, "middle"))
    parts.append(text(right, bottom + 36, xlabel, "soft", size - 1, "end"))
    for index, (name, label, dots, middle) in enumerate(rows):
        y, key = top + index * step + step / 2, palette.key(name)
        parts.append(text(left - 10, y + 4.5, label, "t" + (" label" if own(name) else ""), size, "end"))
        for value, what in dots:
            if math.isfinite(value):
                parts.append(f"<circle cx='{x(value):.1f}' cy='{y:.1f}' r='3.6' class='f-{key}'"
                             f" fill-opacity='.45'><title>{escape(label)}: {escape(what)},"
                             f" {number(value)}</title></circle>")
        if middle is not None and math.isfinite(middle):
            parts.append(f"<rect x='{x(middle) - 2:.1f}' y='{y - 10:.1f}' width='4' height='20'"
                         f" class='f-{key}'><title>{escape(label)}: median {number(middle)}</title></rect>")
    return svg(parts, width, height, title)


def lines(series, palette, title, xlabel, ylabel, ticks=None, logy=False, logx=False, width=440,
          height=300, size=13, unit="s"):
    """Lines with their names at the right end. `series`: [(name, label, [(x, y)])].

    `ticks`: labels of the x positions 0, 1, 2 … when these are not numbers.
    """
    series = [(name, label, [point for point in points if math.isfinite(point[1])])
              for name, label, points in series]
    series = [entry for entry in series if entry[2]]
    margin = max((width_of(label, size, True) for _, label, _ in series), default=0) + 16
    left, right, top, bottom = 48, width - margin, 30, height - (48 if xlabel else 34)
    xs = [px for _, _, points in series for px, _ in points]
    ys = [py for _, _, points in series for _, py in points]
    x = Scale(min(xs, default=0), max(xs, default=1), left + 8, right - 8, log=logx)
    y = Scale(min(ys, default=1) / 1.2 if logy else 0, max(ys, default=1) * (1.2 if logy else 1.06),
              bottom, top, log=logy)
    parts = [text(4, 15, ylabel, "soft", size - 1)]
    for tick in y.ticks(6):
        parts.append(line(left, y(tick), right, y(tick), "grid"))
        parts.append(text(left - 7, y(tick) + 4, short(tick), "soft", size - 1, "end"))
    parts.append(line(left, bottom, right, bottom, "axis"))
    shown = sorted(set(xs))
    last = -100
    for value in shown:
        label = ticks[int(value)] if ticks else short(value)
        if ticks:
            first, _, second = label.partition(", ")
            anchor = "start" if value == shown[0] and len(shown) > 1 else \
                "end" if value == shown[-1] and len(shown) > 1 else "middle"
            at = x(value) + {"start": -10, "end": 10, "middle": 0}[anchor]
            parts.append(text(at, bottom + 17, first, "soft", size - 1.5, anchor))
            parts.append(text(at, bottom + 31, second, "soft", size - 1.5, anchor))
        elif x(value) - last > width_of(label, size) + 8:
            parts.append(text(x(value), bottom + 17, label, "soft", size - 1, "middle"))
            last = x(value)
        parts.append(line(x(value), bottom, x(value), bottom + 4, "axis"))
    if xlabel:
        parts.append(text((left + right) / 2, bottom + 37, xlabel, "soft", size - 1, "middle"))
    for name, label, points in sorted(series, key=lambda entry: own(entry[0])):
        key = palette.key(name)
        points = sorted(points)
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in points)
        parts.append(f"<polyline points='{path}' class='curve s-{key}{' own' if own(name) else ''}'>"
                     f"<title>{escape(label)}</title></polyline>")
        for px, py in points:
            where = ticks[int(px)] if ticks else short(px)
            parts.append(f"<circle cx='{x(px):.1f}' cy='{y(py):.1f}' r='3.2' class='f-{key}'>"
                         f"<title>{escape(label)}, {escape(where)}: {number(py)} {unit}</title></circle>")
    ends = sorted(((y(max(points)[1]), x(max(points)[0]), name, label) for name, label, points in series))
    for (at, end, name, label), spot in zip(ends, spread([end[0] for end in ends], size + 3, top, bottom)):
        key = palette.key(name)
        parts.append(f"<polyline points='{end + 5:.1f},{at:.1f} {right + 4:.1f},{spot:.1f}'"
                     f" class='lead s-{key}' style='stroke-dasharray:none'/>")
        parts.append(text(right + 8, spot + 4.5, label, f"label f-{key}", size))
    return svg(parts, width, height, title)


def spread(places, apart, low, high):
    """Moves sorted places so far that they are `apart`."""
    places = list(places)
    for _ in range(200):
        moved = False
        for index in range(len(places) - 1):
            short_of = apart - (places[index + 1] - places[index])
            if short_of > 0.01:
                places[index] -= short_of / 2
                places[index + 1] += short_of / 2
                moved = True
        for index, place_ in enumerate(places):
            places[index] = min(max(place_, low - 10), high + 10)
        if not moved:
            break
    return places
