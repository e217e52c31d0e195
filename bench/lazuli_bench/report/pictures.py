"""The README's charts of a result of lazuli-bench/hello/1."""

from .bars import twin_bars_picture
from .curves import shares_picture
from .palette import BASELINE
from .svg import width_of
from .words import amount, machine_text, megabytes, median, number, plural, said, seconds


def pictures(hello, palette):
    """SVGs by the names of their files."""
    result = hello.result
    foot = [f"{plural(len(hello.order), 'image')}, median of {plural(hello.rounds(), 'round')}, {hello.reference},"
            f" nothing of an image on the node; {result['date']}", machine_text(result["machine"])]
    return {"deployment-cycle.svg": cycle_picture(hello, palette, foot), "what-it-takes.svg": costs_picture(hello, palette, foot)}


def cycle_picture(hello, palette, foot):
    """How soon images are ready."""
    curves = []
    for name in hello.contenders:
        values = hello.cycles("deployment", hello.reference, name)
        if values:
            curves.append((name, f"{hello.title[name]}, {seconds(median(value for value, _ in values))}", values))
    heading = [cycle_heading(hello),
               "Share of images whose container is ready, by seconds since the pull began; beside the names: medians"]
    return shares_picture(curves, palette, "seconds since the pull began (log scale)", heading, foot)


def cycle_heading(hello):
    """The medians of Lazuli and of the baseline."""
    if not hello.lazuli:
        return "Share of images that are ready, by time"
    ours, theirs = (seconds(hello.middle("deployment", hello.reference, name)) for name in (hello.lazuli, BASELINE))
    heading = (f"Half of the images are ready within {ours} with {said(hello.title[hello.lazuli])},"
               f" {theirs} with {said(hello.title[BASELINE])}")
    if width_of(heading, 16, True) > 715:
        heading = f"Half of the images are ready within {ours} with Lazuli, {theirs} with {BASELINE}"
    return heading


def costs_picture(hello, palette, foot):
    """How soon, and after how many bytes."""
    shape = hello.reference
    fetched = {name: hello.typical("bytes", shape, name) for name in hello.contenders}
    rows = [(name, hello.title[name], (hello.middle("deployment", shape, name), fetched[name] and fetched[name] / 1e6))
            for name in hello.by_speed("deployment", shape)]
    heading = "What a start takes"
    if hello.lazuli and fetched[hello.lazuli] is not None and fetched[BASELINE] is not None:
        heading = f"A start fetches {megabytes(fetched[hello.lazuli])} MB with Lazuli, {megabytes(fetched[BASELINE])} MB with {BASELINE}"
    panels = [("seconds until ready, median", "s", number), ("MB fetched until ready, median", "MB", amount)]
    return twin_bars_picture(rows, palette, panels, [heading], foot)
