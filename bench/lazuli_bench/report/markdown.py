"""The tables of hello's results for documents."""

import math

from .palette import BASELINE
from .words import integer, median

MIRROR = "-mirror"


def tables(hello):
    """All of them, each under its title."""
    parts = [networks(hello), costs(hello), *images(hello), phases(hello), *mirrors(hello)]
    return "\n\n".join(f"{title}:\n\n{table(head, rows)}" for title, head, rows in parts) + "\n"


def table(head, rows):
    """Columns of figures, behind one of names."""
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in [head, *rows]]
    return "\n".join([lines[0], f"|:--{'|--:' * (len(head) - 1)}|", *lines[1:]])


def brief(title):
    """A contender's title as the head of a column."""
    return title.removeprefix("Lazuli, ").removeprefix("OCI, ").removesuffix(" image")


def heads(hello, names):
    """Those of several."""
    return [brief(hello.title[name]) for name in names]


def fixed(value):
    """A time or a ratio with as many digits as the others in its column."""
    return "–" if value is None else "never" if math.isinf(value) else f"{value:.2f}"


def whole(value):
    """A figure without a fraction, if it is there."""
    return "–" if value is None else integer(value)


def spread(values):
    """The median, the least and the greatest."""
    return f"{fixed(median(values))} ({fixed(min(values))}–{fixed(max(values))})" if values else "–"


def multiples(hello, shape, name):
    """Ready ÷ lower bound."""
    return [value for value, _ in hello.above_bound(shape, name)]


def networks(hello):
    """What the headline's table has, and the medians."""
    rows = []
    for shape in hello.shapes:
        rows.append([f"**{shape}**", *[""] * len(hello.own)])
        rows += [["deployment", *(spread(hello.ratios("deployment", shape, name)) for name in hello.own)],
                 ["development", *(spread(hello.ratios("development", shape, name)) for name in hello.own)],
                 ["of the bound", *(spread(multiples(hello, shape, name)) for name in hello.own)],
                 ["first of all", *(f"{won} of {count}" for won, count in (hello.wins(shape, [name]) for name in hello.own))]]
    return f"Medians over images (least–greatest); cycles are {brief(hello.title[BASELINE])} ÷ …", ["", *heads(hello, hello.own)], rows


def costs(hello):
    """Medians of the time to ready, and what starts and pushes of all images take in sum."""
    names, shape = hello.contenders, hello.reference

    def total(field, name, unit=1):
        found = [hello.values(field, shape, name, image) for image in hello.images]
        return whole(sum(map(median, found)) / unit if all(found) else None)

    def pushes(name):
        found = [pushes for key, pushes in hello.pushes.items() if key[1] == name]
        return whole(sum(median(push["seconds"] for push in pushes) for pushes in found) if len(found) == len(hello.images) else None)

    rows = [[f"ready s, {network}", *(fixed(hello.middle("deployment", network, name)) for name in names)] for network in hello.shapes]
    rows += [["MB", *(total("bytes", name, 1e6) for name in names)],
             ["requests", *(total("requests", name) for name in names)],
             ["CPU s", *(total("cpu_s", name) for name in names)],
             ["MiB, median", *(whole(held and held / 2**20) for held in (hello.typical("rss_bytes", shape, name) for name in names))],
             ["push s", *(pushes(name) for name in names)]]
    return f"Medians of the time to ready, and sums at {shape}", ["", *heads(hello, names)], rows


def images(hello):
    """Each image's time to ready."""
    for shape in hello.shapes:
        rows = [[image, whole(entry["bytes"] / 1e6), fixed(median(hello.warm[image])),
                 *(fixed(hello.ready(shape, name, image)) for name in hello.contenders)] for image, entry in hello.images.items()]
        yield f"Seconds to ready, {shape}", ["image", "MB", "warm", *heads(hello, hello.contenders)], rows


def phases(hello):
    """Where the median start spends its time."""
    rows = []
    for name in hello.contenders:
        moments = [[median(hello.values(field, hello.reference, name, image)) for field in ("pull_s", "create_s", "ready_s")]
                   for image in hello.images if hello.values("ready_s", hello.reference, name, image)]
        lasted = [(pulled, created - pulled, max(0, ready - created)) for pulled, created, ready in moments]
        rows.append([brief(hello.title[name]), *(fixed(median(part[place] for part in lasted)) for place in range(3))])
    return f"Seconds of the median start at {hello.reference}", ["", "pull", "create", "run"], rows


def mirrors(hello):
    """Starts through the mirror, and the same without."""
    pairs = [(name.removesuffix(MIRROR), name) for name in hello.contenders if name.endswith(MIRROR)]
    pairs = [pair for pair in pairs if pair[0] in hello.contenders]
    nearest = next((name for _, name in pairs if name in hello.own), None)
    if not nearest:
        return
    columns = [head for plain, _ in pairs for head in (brief(hello.title[plain]), "mirror")]
    for shape in hello.shapes:
        above, rows = {image: value for value, image in hello.above_bound(shape, nearest)}, []
        for image in hello.images:
            cells = []
            for pair in pairs:
                without, with_it = (fixed(hello.ready(shape, name, image)) for name in pair)
                share = "".join(f" ({ratio:.2f})" for ratio in through_by_without(hello, shape, *pair, [image]))
                cells += [without, with_it + share]
            rows.append([image, *cells, fixed(above.get(image))])
        yield f"Through the mirror, {shape}", ["image", *columns, "of the bound"], rows
    rows = [[shape, *(spread(through_by_without(hello, shape, *pair, hello.images)) for pair in pairs),
             spread(hello.ratios("deployment", shape, nearest)), spread(multiples(hello, shape, nearest))] for shape in hello.shapes]
    head = ["", *(f"{brief(hello.title[plain])}, with ÷ without" for plain, _ in pairs),
            f"{brief(hello.title[BASELINE])} ÷ {hello.title[nearest]}", "of the bound"]
    yield "Medians over images (least–greatest)", head, rows


def through_by_without(hello, shape, plain, through, chosen):
    """Ratios of the times to ready, of images that both start."""
    pairs = [[hello.ready(shape, name, image) for name in (through, plain)] for image in chosen]
    return [ours / theirs for ours, theirs in pairs if None not in (ours, theirs) and math.isfinite(ours) and math.isfinite(theirs)]
