"""SVG elements. Every function returns them as text."""

import math

from .words import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def short(value):
    """A tick's label."""
    return f"{value:,.0f}" if value >= 1 and value == int(value) else f"{value:g}"


def width_of(content, size, bold=False):
    """An estimate from above, for fonts that are not known."""
    return (1.13 if bold else 1) * sum(0.34 if letter in "iljt.,:;|'!()[] fr" else 0.9 if letter in "mwMW" else
               0.68 if letter.isupper() else 0.585 for letter in content) * size


def text(x, y, content, classes="t", size=13, anchor="start", extra=""):
    """A line of text."""
    return (f"<text x='{x:.1f}' y='{y:.1f}' class='{classes}' font-size='{size}'"
            f" text-anchor='{anchor}' {extra}>{escape(content)}</text>")


def line(x1, y1, x2, y2, classes):
    """A straight line."""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' class='{classes}'/>"


def curve(points, key, label, thick):
    """A line through points, with the name of what it is."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (f"<polyline points='{path}' class='curve s-{key}{' own' if thick else ''}'>"
            f"<title>{escape(label)}</title></polyline>")


def leader(x1, y1, x2, y2, key):
    """From a curve to its name."""
    return (f"<polyline points='{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f}'"
            f" class='lead s-{key}' style='stroke-dasharray:none'/>")


def svg(parts, width, height, title, style=None):
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


def titles(heading, foot, height):
    """The lines above and below a picture of its own."""
    parts = [text(20, 30 + 20 * index, content, "t" if index == 0 else "soft",
                  16 if index == 0 else 13, extra="font-weight='600'" if index == 0 else "")
             for index, content in enumerate(heading)]
    parts += [text(20, height - 16 - 18 * (len(foot) - 1 - index), content, "soft", 12)
              for index, content in enumerate(foot)]
    return parts


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

    def ticks(self, most):
        """Round values, at most so many or few more."""
        return self.logarithmic_ticks(most) if self.log else self.straight_ticks(most)

    def straight_ticks(self, most):
        """Multiples of 1, 2 or 5 times a power of ten."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / most))
        step *= next(multiple for multiple in (1, 2, 5, 10) if (self.high - self.low) / (step * multiple) <= most)
        first = math.ceil(self.low / step - 1e-9)
        return [round(index * step, 10) for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def logarithmic_ticks(self, most):
        """Powers of ten, and between them what there is room for."""
        decades = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        best = []
        for multiples in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            ticks = [multiple * 10 ** decade for decade in decades for multiple in multiples
                     if self.low * 0.999 <= multiple * 10 ** decade <= self.high * 1.001]
            if len(ticks) > most and len(best) >= 2:
                break
            best = [float(f"{tick:.3g}") for tick in ticks]
        return best
