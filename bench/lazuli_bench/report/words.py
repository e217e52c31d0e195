"""Numbers and words for people."""

import html
import math
import statistics


def escape(text):
    """Text as HTML."""
    return html.escape(text, quote=True)


def median(values):
    """The median; what never happens is infinite. None when there is nothing."""
    values = list(values)
    return statistics.median(values) if values else None


def number(value):
    """Three digits or so."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.00995:
        return f"{value:.2f}"
    return f"{value:.1g}"


def seconds(value):
    """A time, which may be that of nothing, or of what never happened."""
    if value is None:
        return "–"
    return "never" if math.isinf(value) else f"{number(value)} s"


def factor(value):
    """A ratio: 0.85, 1.32, 4.7, 23."""
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if value < 1.995 else f"{value:.1f}" if value < 19.95 else f"{value:,.0f}"


def times(value):
    """A ratio with its sign."""
    return "–" if value is None else f"{factor(value)} ×"


def amount(value):
    """A number of MB or MiB."""
    return f"{value:.2f}" if value < 0.0995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def megabytes(size):
    """Bytes as MB."""
    return amount(size / 1e6)


def integer(value):
    """A number without a fraction."""
    return f"{value:,.0f}"


def percent(part, whole):
    """A share."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def extent(values, form):
    """The least and the greatest, in small."""
    return f"<small>{form(min(values))}–{form(max(values))}</small>"


def over_rounds(values, form):
    """The median, and what it is the median of when that is more than one."""
    return form(median(values)) + (extent(values, form) if len(values) > 1 else "")


def unbroken(shape):
    """A network's name as HTML, broken at its comma only."""
    return escape(shape).replace(" ", "&nbsp;").replace(",&nbsp;", ", ")


def said(title):
    """A contender's title inside of a sentence, which has commas of its own."""
    first, comma, rest = title.partition(", ")
    return f"{first} ({rest})" if comma else title


def joined(words):
    """One, two and three."""
    words = list(words)
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def plural(count, word):
    """So many of them."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def machine_text(machine):
    """What a measurement was done on."""
    return (f"{plural(machine['cpus'], 'core')}, {number(machine['memory_gib'])} GiB, Linux {machine['kernel']},"
            f" load {number(machine['load'])} when it ended")
