"""Sections of the HelloBench report: times until containers are ready."""

import math

from .bars import bars, dots
from .curves import lines_by_name, shares
from .hello import CATEGORIES
from .page import Cell, figure, figures, make_section, network_head, note, table
from .palette import BASELINE, own
from .words import escape, extent, factor, joined, median, number, percent, plural, said, seconds, times

# Slacker, FAST '16: HelloBench on its driver against Docker's of then.
SLACKER = {"deployment": 5.3, "development": 20}
CYCLES = {"deployment": "Deployment cycle: pull and run", "development": "Development cycle: push, pull and run"}


def sections(hello, palette):
    """All of them; None for what was not measured."""
    return [headline(hello), cycle_section(hello, palette, "deployment"), cycle_section(hello, palette, "development"),
            bound_section(hello, palette), category_section(hello, palette), network_section(hello, palette)]


def headline(hello):
    """The figures that are asked for first."""
    shape, lazuli = hello.reference, hello.lazuli
    ratio = median(hello.ratios("deployment", shape, lazuli)) if lazuli else None
    finding = (f"At {shape}, the median image is ready {compared(ratio)} with {said(hello.title[lazuli])}"
               f" than with {said(hello.title[BASELINE])}" if ratio else f"At {shape}, {halves(hello, shape, 'deployment')}")
    shown = "".join(f"<div class='tile'><b>{escape(value)}</b><span>{escape(what)}</span><i>{escape(beside)}</i></div>"
                    for value, what, beside in (headline_tiles(hello) if lazuli else []))
    rows = ratio_rows(hello) + win_rows(hello) + bound_rows(hello) if lazuli else []
    return make_section("headline", "Headline numbers", finding, f"<div class='tiles'>{shown}</div>",
                        table(network_head(hello) + ["Slacker, FAST ’16"], rows, "wide") if rows else "",
                        note("Medians over images; small: least and greatest. Slacker’s figures are those of its paper,"
                             " with its own images, registry and network, against Docker of 2016: they are beside ours"
                             " to compare orders of magnitude, not digits."))


def compared(ratio):
    """A ratio of times in words."""
    return f"{factor(ratio)} times sooner" if ratio >= 1 else f"{factor(1 / ratio)} times later"


def headline_tiles(hello):
    """(figure, what it is, what to compare it with)"""
    shape, title, tiles = hello.reference, said(hello.title[hello.lazuli]), []
    for kind in CYCLES:
        ratio = median(hello.ratios(kind, shape, hello.lazuli))
        if ratio is not None:
            tiles.append((times(ratio), f"{kind} cycle, {said(hello.title[BASELINE])} ÷ {title}",
                          f"Slacker, FAST ’16: {SLACKER[kind]:g} ×"))
    won, count = hello.wins(shape, hello.own)
    tiles.append((f"{won} of {count}", "images on which the best of Lazuli’s drivers is faster than every other contender",
                  percent(won, count)))
    ratio = median(value for value, _ in hello.above_bound(shape, hello.lazuli))
    if ratio is not None:
        tiles.append((times(ratio) if math.isfinite(ratio) else "never", f"{title} ÷ lower bound, median", "1 × is the least possible"))
    return tiles


def ratio_rows(hello):
    """Rows of the headline's table: the baseline's times ÷ Lazuli's."""
    rows = []
    for kind, what in CYCLES.items():
        group = []
        for name in hello.own:
            cells = [ratio_cell(hello.ratios(kind, shape, name), len(hello.order)) for shape in hello.shapes]
            if any(cell != "–" for cell in cells):
                group.append([escape(hello.title[name])] + cells + [f"{SLACKER[kind]:g} ×"])
        if group:
            rows += [f"{what}; {escape(said(hello.title[BASELINE]))} ÷ …"] + group
    return rows


def ratio_cell(ratios, images):
    """The median; small: least and greatest, and how many there are when it is not one for each
    image."""
    if not ratios:
        return "–"
    of = f", {len(ratios)} of {images} images" if len(ratios) < images else ""
    return f"{times(median(ratios))}<small>{factor(min(ratios))}–{factor(max(ratios))}{of}</small>"


def win_rows(hello):
    """Rows of the headline's table: on how many images Lazuli is the soonest."""
    rows = ["Images on which it is faster than every contender that is not Lazuli (deployment cycle)"]
    best = [("best of its drivers", hello.own)] if len(hello.own) > 1 else []
    for title, names in best + [(hello.title[name], [name]) for name in hello.own]:
        found = [hello.wins(shape, names) for shape in hello.shapes]
        rows.append([escape(title)] + [f"{percent(won, count)}<small>{won} of {count}</small>" for won, count in found] + ["–"])
    return rows


def bound_rows(hello):
    """Rows of the headline's table: Lazuli's times ÷ the lower bound."""
    rows = ["… ÷ lower bound"]
    for name in hello.own:
        cells = []
        for shape in hello.shapes:
            values = [value for value, _ in hello.above_bound(shape, name)]
            finite = [value for value in values if math.isfinite(value)]
            cells.append(times(median(values)) + extent(finite, factor) if finite else "–")
        rows.append([escape(hello.title[name])] + cells + ["–"])
    return rows


def cycle_section(hello, palette, kind):
    """Curves of the images that are ready by when."""
    curves = {}
    for shape in hello.shapes:
        found = [(name, hello.title[name], hello.cycles(kind, shape, name)) for name in hello.contenders]
        curves[shape] = [entry for entry in found if entry[2]]
    values = {shape: [value for _, _, pairs in found for value, _ in pairs] for shape, found in curves.items()}
    finite = [value for found in values.values() for value in found if math.isfinite(value)]
    drawn = [shape for shape in hello.shapes if any(map(math.isfinite, values[shape]))]
    if not drawn:
        return None
    pictures = [figure(f"{shape}: {halves(hello, shape, kind)}",
                       shares(curves[shape], palette, f"Share of images ready by time, {kind} cycle, {shape}",
                              "seconds (log scale)", (min(finite), max(finite)))) for shape in drawn]
    what = ("from the begin of the pull until the container’s program has done what counts"
            if kind == "deployment" else "seconds of the push, and then of the pull and the run")
    explained = (f"Share of images that are ready within so many seconds: {what}. Each step is an image, the median of its rounds;"
                 " hover for its name.")
    if any(math.isinf(value) for shape in drawn for value in values[shape]):
        explained += " A curve that ends below 100 % has images that failed."
    first = hello.reference if hello.reference in drawn else drawn[0]
    return make_section(kind, f"{kind.capitalize()} cycle", f"At {first}, {halves(hello, first, kind)}", note(explained),
                        figures(pictures), network_table(hello, kind) if kind == "development" else "")


def halves(hello, shape, kind):
    """Half of the images …: what Lazuli, the fastest other one and the baseline need."""
    tried = hello.by_speed(kind, shape)
    rival = next((name for name in tried if not own(name) and name != BASELINE), None)
    named = [(said(hello.title[name]), hello.middle(kind, shape, name)) for name in (hello.lazuli, rival, BASELINE) if name in tried]
    ready = [f"{number(value)} s with {title}" for title, value in named if math.isfinite(value)]
    if not ready:
        return f"half or more of the starts failed with {joined(title for title, _ in named)}"
    never = [f"never with {title}" for title, value in named if math.isinf(value)]
    return "half of the images are ready within " + joined(ready + never)


def network_table(hello, kind):
    """Medians by contender and network."""
    middles = {name: [hello.middle(kind, shape, name) for shape in hello.shapes] for name in hello.contenders}
    best = [min((value for value in column if value is not None), default=None) for column in zip(*middles.values())]
    rows = [[escape(hello.title[name])] + [best_cell(value, least) for value, least in zip(row, best)]
            for name, row in middles.items() if any(value is not None for value in row)]
    return table([f"Median {kind} cycle"] + network_head(hello)[1:], rows)


def best_cell(value, best):
    """Seconds, which stand out when they are the least."""
    return Cell(seconds(value), "best" if value is not None and value == best else "")


def bound_section(hello, palette):
    """How near starts come to what is possible."""
    drawn = []
    for shape in hello.shapes:
        found = [(name, hello.title[name], hello.above_bound(shape, name)) for name in hello.by_speed("deployment", shape)]
        rows = [(name, title, pairs, median(value for value, _ in pairs)) for name, title, pairs in found
                if any(math.isfinite(value) for value, _ in pairs)]
        if rows:
            _, title, _, ratio = min(rows, key=lambda row: row[3])
            drawn.append(figure(f"{shape}: nearest is {said(title)} with {times(ratio)}",
                                dots(rows, palette, f"Ready ÷ lower bound, {shape}", "ready ÷ lower bound (log scale)", mark=1)))
    if not drawn or not hello.lazuli:
        return None
    ratio = median(value for value, _ in hello.above_bound(hello.reference, hello.lazuli))
    finding = (f"At {hello.reference}, {said(hello.title[hello.lazuli])} takes {factor(ratio)} times the lower bound"
               if ratio is not None and math.isfinite(ratio) else "How near the lower bound starts come")
    return make_section("bound", "Lower bound", finding, note(
        "Lower bound of an image: its start with everything local and cached, and the fewest bytes that any lazy"
        f" contender fetched for it ÷ bandwidth, and {hello.round_trips} round trips"
        f"{', and containerd’s pull of busybox on loopback' if hello.small_pull() else ''}."
        " On loopback nothing is counted for bytes. Each dot is an image, the bar is the median."), figures(drawn))


def category_section(hello, palette):
    """Medians by category."""
    shape, soonest, drawn = hello.reference, {}, []
    categories = list(dict.fromkeys(map(hello.category, hello.order)))
    middles = {(category, name): hello.middle_of_category(category, shape, name) for category in categories for name in hello.contenders}
    high = max((value for value in middles.values() if value is not None and math.isfinite(value)), default=1)
    for category in categories:
        rows = [(name, hello.title[name], middles[category, name]) for name in hello.contenders if middles[category, name] is not None]
        _, best, least = min(rows, key=lambda row: row[2])
        if math.isinf(least):
            continue
        soonest[category] = min(rows, key=lambda row: row[2])[0]
        title, count = CATEGORIES[category], sum(hello.category(image) == category for image in hello.order)
        drawn.append(figure(f"{title} ({plural(count, 'image')}): soonest {said(best)}, {seconds(least)}",
                            bars(rows, palette, f"Median seconds until ready, {title}, {shape}", "s", high)))
    if not drawn:
        return None
    lost = [f"{CATEGORIES[category].lower()} ({said(hello.title[name])})" for category, name in soonest.items() if not own(name)]
    finding = f"At {shape}, a driver of Lazuli has the lowest median in {len(soonest) - len(lost)} of {len(soonest)} categories"
    if lost:
        finding += f"; not in {joined(lost)}"
    return make_section("categories", "Categories", finding, note(
        f"Median seconds of the deployment cycle at {escape(shape)}; all bars have the same scale."),
        figures(drawn), other_networks(hello, categories))


def other_networks(hello, categories):
    """A table of medians by category, of all networks but the one whose bars are drawn."""
    rows = []
    for shape in hello.shapes:
        if shape == hello.reference:
            continue
        rows.append(escape(shape))
        for category in categories:
            values = [hello.middle_of_category(category, shape, name) for name in hello.contenders]
            best = min(value for value in values if value is not None)
            rows.append([escape(CATEGORIES[category])] + [best_cell(value, best) for value in values])
    head = ["Other networks, median"] + [escape(hello.title[name]) for name in hello.contenders]
    return table(head, rows, "wide") if rows else ""


def network_section(hello, palette):
    """Medians by network, when there are several."""
    names = list(hello.shapes)
    if len(names) < 2:
        return None
    middles = {name: [hello.middle("deployment", shape, name) for shape in names] for name in hello.contenders}
    series = [(name, hello.title[name], [(index, value) for index, value in enumerate(row) if value is not None])
              for name, row in middles.items()]
    growth = []
    for name in filter(None, [hello.lazuli, BASELINE]):
        values = [value for value in middles[name] if value is not None and math.isfinite(value)]
        if values:
            growth.append(f"from {number(min(values))} to {number(max(values))} s with {said(hello.title[name])}")
    picture = lines_by_name(series, palette, "Median seconds until ready by network", "median seconds until ready (log scale)", names)
    return make_section("networks", "Networks", f"Between the networks, medians go {joined(growth)}" if growth else "Medians by network",
                        figures([figure("Median deployment cycle by network", picture),
                                 f"<div class='beside'>{network_table(hello, 'deployment')}</div>"]))
