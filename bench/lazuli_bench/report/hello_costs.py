"""Sections of the HelloBench report: costs of starts, single images, and the method."""

import math
from typing import NamedTuple

from .bars import bars
from .hello import CATEGORIES
from .page import Cell, figure, figures, make_section, note, paragraph, table
from .palette import BASELINE
from .words import amount, escape, extent, integer, joined, machine_text, median, megabytes, number, over_rounds, plural, said


class Cost(NamedTuple):
    """A field of starts, and how people read it."""

    field: str
    scale: int
    unit: str
    title: str
    form: object


COSTS = [Cost("bytes", 10**6, "MB", "MB fetched", amount), Cost("requests", 1, "", "Requests", integer),
         Cost("cpu_s", 1, "s", "CPU seconds", number), Cost("rss_bytes", 2**20, "MiB", "Memory of the daemons", amount)]


def sections(hello, palette):
    """All of them."""
    return [cost_section(hello, palette), *(image_section(hello, shape) for shape in hello.shapes), method_section(hello)]


def cost_section(hello, palette):
    """What a start takes besides time, and which step takes the time."""
    shape = hello.reference
    rows = []
    for each in hello.shapes:
        rows.append(escape(each))
        rows += [cost_row(hello, each, name) for name in hello.contenders if hello.starts_of(each, name)]
    head = ["Median", "MB fetched", "requests", "CPU s", "memory MiB", "pull s", "create s", "run s", "MB pushed"]
    fetched = {name: hello.typical("bytes", shape, name) for name in hello.contenders}
    finding = "What a start takes"
    if hello.lazuli and fetched[hello.lazuli] is not None and fetched[BASELINE] is not None:
        finding = (f"At {shape}, a median start fetches {megabytes(fetched[hello.lazuli])} MB with {said(hello.title[hello.lazuli])}"
                   f" and {megabytes(fetched[BASELINE])} MB with {said(hello.title[BASELINE])}")
    return make_section("costs", "What a start takes", finding, note(
        f"Medians over images of starts that worked, at {escape(shape)}; in the table small: least and greatest. The time is split into"
        " the pull, the creation of the container after it, and the run until ready; these are medians of their own, so they do"
        " not add up."), figures([cost_figure(hello, palette, shape, cost) for cost in COSTS]), table(head, rows, "wide"))


def cost_figure(hello, palette, shape, cost):
    """Bars of one cost."""
    typical = {name: hello.typical(cost.field, shape, name) for name in hello.contenders}
    rows = [(name, hello.title[name], value / cost.scale) for name, value in typical.items() if value is not None]
    _, title, least = min(rows, key=lambda row: row[2])
    return figure(f"{cost.title}: least with {said(title)}, {cost.form(least)} {cost.unit}".rstrip(),
                  bars(rows, palette, f"{cost.title}, median, {shape}", cost.unit, form=cost.form))


def cost_row(hello, shape, name):
    """All costs of a contender's starts."""
    starts, pushed = hello.starts_of(shape, name), hello.pushed_bytes(shape, name)
    cells = [cost.form(hello.typical(cost.field, shape, name) / cost.scale)
             + extent([start[cost.field] / cost.scale for start in starts], cost.form) for cost in COSTS]
    steps = [median(start["pull_s"] for start in starts), median(start["create_s"] - start["pull_s"] for start in starts),
             median(start["ready_s"] - start["create_s"] for start in starts)]
    return [escape(hello.title[name])] + cells + [number(step) for step in steps] + [megabytes(pushed) if pushed is not None else "–"]


def image_section(hello, shape):
    """Every image on one network, and what failed there."""
    rows, category, won = [], None, dict.fromkeys(hello.contenders, 0)
    for image in hello.order:
        if hello.category(image) != category:
            category = hello.category(image)
            rows.append(escape(CATEGORIES[category]))
        ready = {name: hello.ready(shape, name, image) for name in hello.contenders}
        best = min((value for value in ready.values() if value is not None and math.isfinite(value)), default=None)
        for name in hello.contenders:
            won[name] += best is not None and ready[name] == best
        rows.append([escape(image), megabytes(hello.images[image]["bytes"])]
                    + [image_cell(hello, shape, name, image, best) for name in hello.contenders])
    soonest = sorted((name for name in won if won[name]), key=lambda name: -won[name])
    finding = f"{shape}: soonest " + joined(f"{said(hello.title[name])} on {won[name]} of {len(hello.order)}" for name in soonest)
    explained = ("Seconds until ready (pull and run): median" + (", small: fastest to slowest round" if hello.rounds() > 1 else "")
                 + ". MB: the OCI image, compressed. Bold: the soonest of the row.")
    return make_section(f"images-{list(hello.shapes).index(shape) + 1}", "Every image", finding if soonest else shape, note(explained),
                        table(["Image", "MB"] + [escape(hello.title[name]) for name in hello.contenders], rows, "wide images"),
                        failure_list(failures(hello, shape), shape))


def image_cell(hello, shape, name, image, best):
    """One contender's seconds of one image, and how many starts failed."""
    starts, errors = (found.get((shape, name, image), []) for found in (hello.starts, hello.errors))
    why = "; ".join(sorted(set(errors)))
    if not starts:
        error = hello.push_error(name, image)
        if error is not None:
            return Cell("failed<small>push</small>", "failed", error)
        return Cell(f"failed<small>{plural(len(errors), 'round')}</small>", "failed", why) if errors else "–"
    shown = over_rounds([start["ready_s"] for start in starts], number)
    if errors:
        shown += f"<small class='failed'>{len(errors)} of {len(errors) + len(starts)} failed</small>"
    return Cell(shown, "best" if hello.ready(shape, name, image) == best else "", why)


def failures(hello, shape):
    """What went wrong, each once."""
    found = []
    for image in hello.order:
        for name in hello.contenders:
            error, prefix = hello.push_error(name, image), f"{image}, {hello.title[name]}: "
            found += [f"{prefix}push: {error}"] if error is not None else []
            found += [prefix + error for error in hello.errors.get((shape, name, image), [])]
    return list(dict.fromkeys(found))


def failure_list(texts, shape):
    """The list that is shown of them."""
    if not texts:
        return ""
    return (f"<details open><summary>{escape(plural(len(texts), 'failure') + ' at ' + shape)}</summary><ul class='failures'>"
            + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul></details>")


def noise(hello):
    """When and where it was measured, and what differences say."""
    result, spreads = hello.result, hello.spreads()
    measured = (f"Measured {escape(result['date'])} on a machine with {escape(machine_text(result['machine']))};"
                f" {plural(hello.rounds(), 'round')} of every start. ")
    if not spreads:
        return measured + "With one round nothing is known of the spread: small differences say little."
    return measured + (f"Between the rounds of the same start, slowest − fastest is {100 * median(spreads):.0f} % of the median"
                       f" for half of the starts, {100 * spreads[int(0.9 * (len(spreads) - 1))]:.0f} % or less for nine of ten,"
                       f" {100 * spreads[-1]:.0f} % at most: smaller differences say little.")


def method_section(hello):
    """How it was measured, and which contenders took part."""
    result, rows = hello.result, []
    for contender in result["contenders"]:
        name = contender["name"]
        rows.append([escape(contender["title"]), escape(contender["version"]),
                     str(len({image for _, contender, image in hello.starts if contender == name})),
                     str(sum(len(errors) for (_, contender, _), errors in hello.errors.items() if contender == name))])
    missing = "; ".join(f"{escape(title)} ({escape(reason)})" for title, reason in result["missing"].items())
    return make_section("method", "How it was measured", f"{plural(hello.rounds(), 'round')}, {plural(len(hello.order), 'image')},"
                        f" {plural(len(hello.contenders), 'contender')}, {plural(len(hello.shapes), 'network')}",
                        paragraph(noise(hello)),
                        paragraph("Deployment cycle: from the begin of the pull until the container is ready. Development cycle:"
                                  " that, and the push of the image before it. A failed start counts as never ready in medians and curves; ratios"
                                  " are of images that both sides start."),
                        table(["Contender", "version", "images started", "failed starts"], rows),
                        paragraph(f"Not in this comparison: {missing}.") if missing else "",
                        paragraph(f"Network: {escape(result['shaper'])}."), paragraph(f"containerd {escape(result['containerd'])}."),
                        f"<pre>{escape(result['command'])}</pre>")
