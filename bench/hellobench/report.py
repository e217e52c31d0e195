"""Makes one HTML page, and the README's pictures, from results of the benches.

The page needs nothing but itself: its style and its plots are inside, and there are no scripts.
What the results look like is in schema.md.
"""

import argparse
import json
import math
import os
import statistics
import sys

from . import plots
from .plots import escape, number

USAGE = "lazuli-bench report [--html FILE] [--svg DIRECTORY] RESULT.json..."

CATEGORIES = ["distro", "database", "language", "web-server", "web-framework", "other"]
CATEGORY_TITLES = {"distro": "Distributions", "database": "Databases", "language": "Languages",
                   "web-server": "Web servers", "web-framework": "Web frameworks", "other": "Other"}

# Slacker, FAST '16: HelloBench on its driver against Docker's of then.
SLACKER = {"deployment": 5.3, "development": 20}

# Ratios to native that are published for file systems of this kind.
READ, METADATA, COMPILE = {"seq read", "rand read"}, {"find", "ls -lR"}, {"compile"}
PUBLISHED = [(READ, {"fanotify": "0.85–0.93", "fuse": "0.70"}), (METADATA, {"fanotify": "1.82", "fuse": "0.33"}),
             (COMPILE, {"fanotify": "1.0", "fuse": "0.78"})]

# These pull whole images, so they say nothing about the least that a start has to fetch.
WHOLE = {"overlayfs", "erofs", "native", "skopeo"}

BASELINE = "overlayfs"
INFINITE = math.inf


def main(argv):
    parser = argparse.ArgumentParser(prog="lazuli-bench report", usage=USAGE, description=__doc__.splitlines()[0])
    parser.add_argument("--html", metavar="FILE", help="the page; standard output when neither option is given")
    parser.add_argument("--svg", metavar="DIRECTORY", help="where the README's pictures go")
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    options = parser.parse_args(argv)
    results = []
    for path in options.results:
        try:
            with open(path, encoding="utf-8") as file:
                result = json.load(file)
        except (OSError, ValueError) as error:
            return complain(f"{path}: {error}")
        schema = result.get("schema") if isinstance(result, dict) else None
        if schema not in SECTIONS:
            return complain(f"{path}: schema {schema!r} is not known; known are {', '.join(SECTIONS)}")
        # The day is enough.
        result["date"] = str(result.get("date") or "")[:10]
        results.append(result)
    # The order of the page, whatever the order of the files.
    results.sort(key=lambda result: list(SECTIONS).index(result["schema"]))
    palette = palette_of(results)
    if options.svg:
        hello = next((result for result in results if result["schema"].startswith("lazuli-bench/hello/")), None)
        if hello is None:
            return complain("--svg needs a result of lazuli-bench/hello/1")
        if not hello["starts"]:
            return complain("--svg needs a start")
        os.makedirs(options.svg, exist_ok=True)
        for name, picture in pictures(Hello(hello), palette).items():
            write(os.path.join(options.svg, name), picture)
    if options.html:
        write(options.html, page(results, palette))
    elif not options.svg:
        sys.stdout.write(page(results, palette))
    return 0


def complain(message):
    print(f"lazuli-bench report: {message}", file=sys.stderr)
    return 2


def write(path, content):
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)


def is_lazy(contender):
    return contender.get("lazy", contender["name"] not in WHOLE)


def palette_of(results):
    """Contenders have the same colour in every section."""
    palette = plots.Palette()
    for result in results:
        for contender in result.get("contenders", []):
            palette.titles.setdefault(contender["name"], contender.get("title", contender["name"]))
            palette.add(contender["name"], kind_of(contender["name"], is_lazy(contender)))
    for result in results:
        for entry in result.get("updates", []) + result.get("points", []):
            if "contender" in entry:
                palette.add(entry["contender"], kind_of(entry["contender"]))
    for name, kind in [("lazuli", "lazuli"), ("lazuli-fuse", "lazuli"), ("keeper", "whole"), ("worker", "lazuli")]:
        palette.add(name, kind)
    return palette


def kind_of(name, lazy=None):
    if plots.own(name):
        return "lazuli"
    return "lazy" if (name not in WHOLE if lazy is None else lazy) else "whole"


# ---- numbers ----

def median(values):
    values = list(values)
    return statistics.median(values) if values else None


def half_ready(values):
    """The median where failures count as never; None when there is nothing."""
    values = sorted(values)
    if not values:
        return None
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    low, high = values[middle - 1], values[middle]
    return INFINITE if math.isinf(high) else (low + high) / 2


def seconds(value):
    if value is None:
        return "–"
    return "never" if math.isinf(value) else f"{number(value)} s"


def factor(value):
    """A ratio, for people: 0.85, 1.32, 4.7, 23."""
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if value < 1.995 else f"{value:.1f}" if value < 19.95 else f"{value:,.0f}"


def times(value):
    return "–" if value is None else f"{factor(value)} ×"


def megabytes(value):
    return f"{value:.2f}" if value < 0.0995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def unbroken(name):
    """A network's name, broken at its comma only."""
    return escape(name).replace(" ", "&nbsp;").replace(",&nbsp;", ", ")


def whole(value):
    return f"{value:,.0f}"


def said(title):
    """A contender's title inside of a sentence, which has commas of its own."""
    first, comma, rest = title.partition(", ")
    return f"{first} ({rest})" if comma else title


def percent(part, whole):
    return f"{100 * part / whole:.0f} %" if whole else "–"


def joined(words):
    words = list(words)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


def plural(count, word):
    return f"{count} {word}" if count == 1 else f"{count} {word}{'es' if word.endswith('x') else 's'}"


class Hello:
    """Results of lazuli-bench/hello/1, by shape, contender and image."""

    def __init__(self, result):
        self.result = result
        self.images = result.get("images", {})
        self.shapes = [shape for shape in result["shapes"]
                       if any(start["shape"] == shape["name"] for start in result["starts"])]
        named = {contender["name"]: contender for contender in result["contenders"]}
        started = {start["contender"] for start in result["starts"]}
        self.contenders = [name for name in named if name in started]
        self.title = {name: named[name].get("title", name) for name in named}
        self.version = {name: named[name].get("version", "") for name in named}
        self.lazy = {name for name in named if is_lazy(named[name])}
        self.starts, self.errors, self.pushes, self.push_errors, self.warm = {}, {}, {}, {}, {}
        for start in result["starts"]:
            key = start["shape"], start["contender"], start["image"]
            if start.get("error") is not None or start.get("ready_s") is None:
                self.errors.setdefault(key, []).append(start.get("error") or "no figures")
            else:
                self.starts.setdefault(key, []).append(start)
        for push in result.get("pushes", []):
            key = push["shape"], push["contender"], push["image"]
            if push.get("error") is not None or push.get("seconds") is None:
                self.push_errors.setdefault(key, []).append(push.get("error") or "no figures")
            else:
                self.pushes.setdefault(key, []).append(push)
        for start in result.get("warm", []):
            self.warm.setdefault(start["image"], []).append(start["seconds"])
        self.order = sorted(self.images, key=lambda image: (self.rank(image), image))
        self.reference = next((shape["name"] for shape in self.shapes if shape.get("round_trip_ms") == 20
                               and shape.get("megabits") == 1000),
                              self.shapes[0]["name"] if self.shapes else None)
        self.own = [name for name in self.contenders if plots.own(name)]
        self.others = [name for name in self.contenders if not plots.own(name)]
        self.lazuli = "lazuli" if "lazuli" in self.own else self.own[0] if self.own else None
        self.baseline = BASELINE if BASELINE in self.contenders else None

    def rank(self, image):
        category = self.category(image)
        return CATEGORIES.index(category) if category in CATEGORIES else len(CATEGORIES)

    def category(self, image):
        return self.images.get(image, {}).get("category", "other")

    def tried(self, shape, contender):
        return [image for image in self.order if (shape, contender, image) in self.starts
                or (shape, contender, image) in self.errors]

    def values(self, field, shape, contender, image):
        return [start[field] for start in self.starts.get((shape, contender, image), [])
                if start.get(field) is not None]

    def ready(self, shape, contender, image):
        """Median seconds of the deployment cycle: infinite when all of its starts failed, None when there is none."""
        values = self.values("ready_s", shape, contender, image)
        if values:
            return statistics.median(values)
        return INFINITE if (shape, contender, image) in self.errors else None

    def developed(self, shape, contender, image):
        """The same with the push before it."""
        ready = self.ready(shape, contender, image)
        if ready is None:
            return None
        if (shape, contender, image) in self.pushes:
            return ready + statistics.median(push["seconds"] for push in self.pushes[shape, contender, image])
        return INFINITE if (shape, contender, image) in self.push_errors else None

    def cycle(self, kind, shape, contender, image):
        return (self.ready if kind == "deployment" else self.developed)(shape, contender, image)

    def cycles(self, kind, shape, contender, images=None):
        """[(seconds, image)] of all images that were tried."""
        pairs = [(self.cycle(kind, shape, contender, image), image)
                 for image in (self.order if images is None else images)]
        return [pair for pair in pairs if pair[0] is not None]

    def middle(self, kind, shape, contender, images=None):
        return half_ready(value for value, _ in self.cycles(kind, shape, contender, images))

    def ratios(self, kind, shape, contender):
        """Baseline ÷ contender, of images that both start."""
        ratios = []
        for image in self.order:
            ours, theirs = (self.cycle(kind, shape, name, image) for name in (contender, self.baseline))
            if ours is not None and theirs is not None and math.isfinite(ours) and math.isfinite(theirs) and ours > 0:
                ratios.append(theirs / ours)
        return ratios

    def wins(self, shape, candidates, kind="deployment"):
        """On how many images the best candidate is faster than every other contender, and of how many."""
        won = count = 0
        for image in self.order:
            ours = [value for value in (self.cycle(kind, shape, name, image) for name in candidates) if value is not None]
            theirs = [value for value in (self.cycle(kind, shape, name, image) for name in self.others)
                      if value is not None]
            if ours and theirs:
                count += 1
                won += min(ours) < min(theirs)
        return won, count

    def bound(self, shape, image):
        """The least that a start over this network can take."""
        shape = next(entry for entry in self.shapes if entry["name"] == shape)
        fetched = [size for name in self.contenders if name in self.lazy
                   for size in self.values("bytes", shape["name"], name, image)]
        if image not in self.warm or not fetched:
            return None
        rate = (shape.get("megabits") or 0) * 1e6 / 8
        return (statistics.median(self.warm[image]) + (min(fetched) / rate if rate else 0)
                + 4 * (shape.get("round_trip_ms") or 0) / 1000)

    def above_bound(self, shape, contender):
        """[(ready ÷ bound, image)]"""
        pairs = [(self.ready(shape, contender, image), self.bound(shape, image), image) for image in self.order]
        return [(ready / bound, image) for ready, bound, image in pairs if ready is not None and bound]

    def typical(self, field, shape, contender, images=None):
        """Median over images of the median over rounds, of starts that worked."""
        return median(statistics.median(values) for values in
                      (self.values(field, shape, contender, image) for image in images or self.order) if values)

    def rounds(self):
        return max((len(starts) for starts in self.starts.values()), default=0)

    def spreads(self):
        """(slowest − fastest) ÷ median, of everything that was started more than once."""
        spreads = []
        for starts in self.starts.values():
            values = [start["ready_s"] for start in starts]
            if len(values) > 1 and statistics.median(values) > 0:
                spreads.append((max(values) - min(values)) / statistics.median(values))
        return spreads

    def by_speed(self, shape, kind="deployment"):
        timed = [(self.middle(kind, shape, name), name) for name in self.contenders]
        return [name for value, name in sorted((pair for pair in timed if pair[0] is not None),
                                               key=lambda pair: pair[0])]


# ---- pieces of the page ----

def table(head, rows, classes="", caption="", first=1):
    """Cells are text, or (text, class), or (text, class, title); texts are HTML."""
    def cell(content, tag, index):
        content = content if isinstance(content, tuple) else (content,)
        classes_ = [content[1]] if len(content) > 1 and content[1] else []
        if index < first:
            classes_.append("name")
        title = f" title='{escape(content[2])}'" if len(content) > 2 and content[2] else ""
        scope = " scope='row'" if tag == "th" and index == 0 else ""
        return f"<{tag}{scope}{' class=' + chr(39) + ' '.join(classes_) + chr(39) if classes_ else ''}{title}>" \
               f"{content[0]}</{tag}>"

    lines = [f"<div class='scroll' tabindex='0'><table{' class=' + chr(39) + classes + chr(39) if classes else ''}>"]
    if caption:
        lines.append(f"<caption>{escape(caption)}</caption>")
    lines.append("<thead><tr>" + "".join(cell(content, "th", index) for index, content in enumerate(head))
                 + "</tr></thead><tbody>")
    for row in rows:
        if isinstance(row, str):
            lines.append(f"<tr class='group'><th colspan='{len(head)}'><span>{row}</span></th></tr>")
        else:
            lines.append("<tr>" + "".join(cell(content, "th" if index == 0 else "td", index)
                                          for index, content in enumerate(row)) + "</tr>")
    return "\n".join(lines) + "</tbody></table></div>"


def section(topic, finding, *parts, id_=None):
    identity = f" id='{id_}'" if id_ else ""
    return (f"<section{identity}><p class='topic'>{escape(topic)}</p><h2>{escape(finding)}</h2>"
            + "\n".join(part for part in parts if part) + "</section>")


def figure(caption, picture):
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def figures(parts):
    three = " three" if len(parts) % 3 == 0 else ""
    return f"<div class='figures{three}'>" + "\n".join(parts) + "</div>" if parts else ""


def paragraph(text, classes=""):
    return f"<p{' class=' + chr(39) + classes + chr(39) if classes else ''}>{text}</p>"


def machine_text(machine):
    parts = []
    if machine.get("cpus"):
        parts.append(plural(machine["cpus"], "core"))
    if machine.get("memory_gib"):
        parts.append(f"{number(machine['memory_gib'])} GiB")
    if machine.get("kernel"):
        parts.append(f"Linux {machine['kernel']}")
    if machine.get("load") is not None:
        load = machine["load"]
        parts.append(f"load {number(load) if isinstance(load, (int, float)) else load} at the start")
    return ", ".join(parts)


# ---- lazuli-bench/hello/1 ----

def hello_sections(result, palette):
    hello = Hello(result)
    if not hello.shapes:
        return [section("Starts", "No start was measured.")]
    parts = [headline(hello)]
    parts += [cycle_section(hello, palette, "deployment"), cycle_section(hello, palette, "development"),
              bound_section(hello, palette), category_section(hello, palette), network_section(hello, palette),
              cost_section(hello, palette), *image_sections(hello), method_section(hello)]
    return [part for part in parts if part]


def compared(ratio):
    if ratio >= 1:
        return f"{factor(ratio)} times sooner"
    return f"{factor(1 / ratio)} times later"


def headline(hello):
    ref, tiles = hello.reference, []
    baseline, lazuli = hello.baseline, hello.lazuli
    if baseline and lazuli:
        for kind in ("deployment", "development"):
            ratio = median(hello.ratios(kind, ref, lazuli))
            if ratio is not None:
                tiles.append((times(ratio), f"{kind} cycle, {said(hello.title[baseline])} ÷ {said(hello.title[lazuli])}",
                              f"Slacker, FAST ’16: {SLACKER[kind]:g} ×"))
    if hello.own and hello.others:
        won, count = hello.wins(ref, hello.own)
        tiles.append((f"{won} of {count}", "images on which the best of Lazuli’s drivers is faster than every other contender",
                      percent(won, count)))
    if lazuli:
        ratio = half_ready(value for value, _ in hello.above_bound(ref, lazuli))
        if ratio is not None:
            tiles.append((times(ratio) if math.isfinite(ratio) else "never",
                          f"{said(hello.title[lazuli])} ÷ lower bound, median", "1 × is the least possible"))
    shown = "".join(f"<div class='tile'><b>{escape(value)}</b><span>{escape(what)}</span><i>{escape(note)}</i></div>"
                    for value, what, note in tiles)
    ratio = median(hello.ratios("deployment", ref, lazuli)) if baseline and lazuli else None
    finding = (f"At {ref}, the median image is ready {compared(ratio)} with {said(hello.title[lazuli])}"
               f" than with {said(hello.title[baseline])}" if ratio else f"At {ref}, {halves(hello, ref, 'deployment')}")
    rows = []
    if baseline:
        for kind, what in [("deployment", "Deployment cycle: pull and run"), ("development", "Development cycle: push, pull and run")]:
            group = []
            for name in hello.own:
                cells = []
                for shape in hello.shapes:
                    ratios = hello.ratios(kind, shape["name"], name)
                    of = f", {len(ratios)} of {len(hello.order)} images" if len(ratios) < len(hello.order) else ""
                    cells.append(f"{times(median(ratios))}<small>{factor(min(ratios))}–{factor(max(ratios))}{of}</small>"
                                 if ratios else "–")
                if any(cell != "–" for cell in cells):
                    group.append([escape(hello.title[name])] + cells + [f"{SLACKER[kind]:g} ×"])
            if group:
                rows += [f"{what}; {escape(said(hello.title[baseline]))} ÷ …"] + group
    if hello.own and hello.others:
        rows.append("Images on which it is faster than every contender that is not Lazuli (deployment cycle)")
        candidates = [("best of its drivers", hello.own)] if len(hello.own) > 1 else []
        for title, names in candidates + [(hello.title[name], [name]) for name in hello.own]:
            cells = []
            for shape in hello.shapes:
                won, count = hello.wins(shape["name"], names)
                cells.append(f"{percent(won, count)}<small>{won} of {count}</small>")
            rows.append([escape(title)] + cells + ["–"])
    if hello.own and any(hello.above_bound(shape["name"], name) for shape in hello.shapes for name in hello.own):
        rows.append("… ÷ lower bound")
        for name in hello.own:
            cells = []
            for shape in hello.shapes:
                pairs = [value for value, _ in hello.above_bound(shape["name"], name)]
                finite = [value for value in pairs if math.isfinite(value)]
                cells.append(f"{times(half_ready(pairs))}<small>{factor(min(finite))}–{factor(max(finite))}</small>"
                             if finite else "–")
            rows.append([escape(hello.title[name])] + cells + ["–"])
    head = [""] + [unbroken(shape["name"]) for shape in hello.shapes] + ["Slacker, FAST ’16"]
    return section("Headline numbers", finding, f"<div class='tiles'>{shown}</div>",
                   table(head, rows, "wide") if rows else "",
                   paragraph("Medians over images; small: least and greatest. Slacker’s figures are those of its paper,"
                             " with its own images, registry and network, against Docker of 2016: they are beside ours"
                             " to compare orders of magnitude, not digits.", "note"), id_="headline")


def cycle_section(hello, palette, kind):
    drawn, domain = [], []
    for shape in hello.shapes:
        curves = []
        for name in hello.contenders:
            values = hello.cycles(kind, shape["name"], name)
            if values:
                curves.append((name, hello.title[name], values, len(values)))
        if any(math.isfinite(value) for _, _, values, _ in curves for value, _ in values):
            drawn.append((shape["name"], curves))
            domain += [value for _, _, values, _ in curves for value, _ in values if math.isfinite(value)]
    if not drawn:
        return ""
    pictures_, failed = [], False
    for shape, curves in drawn:
        failed |= any(math.isinf(value) for _, _, values, _ in curves for value, _ in values)
        caption = halves(hello, shape, kind)
        pictures_.append(figure(f"{shape}: {caption}",
                                plots.cdf(curves, palette, f"Share of images ready by time, {kind} cycle, {shape}",
                                          "seconds (log scale)", domain=(min(domain), max(domain)))))
    what = ("from the begin of the pull until the container’s program has done what counts"
            if kind == "deployment" else "seconds of the push, and then of the pull and the run")
    note = f"Share of images that are ready within so many seconds: {what}. Each step is an image, the median of its rounds; hover for its name."
    if failed:
        note += " A curve that ends below 100 % has images that failed."
    first = drawn[0][0] if hello.reference not in [shape for shape, _ in drawn] else hello.reference
    finding = halves(hello, first, kind)
    finding = f"At {first}, {finding}"
    rows = []
    for name in hello.contenders:
        cells = [seconds(hello.middle(kind, shape, name)) for shape, _ in drawn]
        rows.append([escape(hello.title[name])] + cells)
    return section(f"{kind.capitalize()} cycle", finding, paragraph(note, "note"), figures(pictures_),
                   network_table(hello, kind) if kind == "development" else "", id_=kind)


def halves(hello, shape, kind):
    """Half of the images …: what Lazuli, the fastest other one and the baseline need."""
    named = []
    others = [name for name in hello.by_speed(shape, kind) if name in hello.others and name != hello.baseline]
    for name in [hello.lazuli, others[0] if others else None, hello.baseline]:
        if name and hello.middle(kind, shape, name) is not None:
            value = hello.middle(kind, shape, name)
            named.append((said(hello.title[name]), f"{number(value)} s" if math.isfinite(value) else None))
    if not named:
        return "no median"
    first = next((index for index, (_, value) in enumerate(named) if value), None)
    if first is None:
        return f"half or more of the starts failed with {joined(title for title, _ in named)}"
    return "half of the images are ready " + joined(
        f"{'within ' if index == first else ''}{value} with {title}" if value else f"never with {title}"
        for index, (title, value) in sorted(enumerate(named), key=lambda pair: pair[1][1] is None))


def network_table(hello, kind):
    rows = []
    best = {shape["name"]: min((value for value in (hello.middle(kind, shape["name"], name) for name in hello.contenders)
                                if value is not None), default=None) for shape in hello.shapes}
    for name in hello.contenders:
        cells = []
        for shape in hello.shapes:
            value = hello.middle(kind, shape["name"], name)
            cells.append((seconds(value), "best" if value is not None and value == best[shape["name"]] else ""))
        if any(cell[0] != "–" for cell in cells):
            rows.append([escape(hello.title[name])] + cells)
    return table([f"Median {kind} cycle"] + [unbroken(shape["name"]) for shape in hello.shapes], rows)


def bound_section(hello, palette):
    drawn = []
    for shape in hello.shapes:
        rows = []
        for name in hello.by_speed(shape["name"]):
            dots = hello.above_bound(shape["name"], name)
            if any(math.isfinite(value) for value, _ in dots):
                rows.append((name, hello.title[name], dots, half_ready(value for value, _ in dots)))
        if rows:
            best = min(rows, key=lambda row: row[3])
            drawn.append(figure(f"{shape['name']}: nearest is {said(best[1])} with {times(best[3])}",
                                plots.strip(rows, palette, f"Ready ÷ lower bound, {shape['name']}",
                                            "ready ÷ lower bound (log scale)", mark=1)))
    if not drawn or not hello.lazuli:
        return ""
    ratio = half_ready(value for value, _ in hello.above_bound(hello.reference, hello.lazuli))
    finding = (f"At {hello.reference}, {said(hello.title[hello.lazuli])} takes {factor(ratio)} times the lower bound"
               if ratio is not None and math.isfinite(ratio) else "How near the lower bound starts come")
    note = paragraph("Lower bound of an image: its start with everything local and cached, and the fewest bytes that any lazy"
                     " contender fetched for it ÷ bandwidth, and four round trips. On loopback nothing is counted for bytes."
                     " Each dot is an image, the bar is the median.", "note")
    return section("Lower bound", finding, note, figures(drawn), id_="bound")


def category_section(hello, palette):
    groups = {}
    for image in hello.order:
        groups.setdefault(hello.category(image), []).append(image)
    names = [name for name in CATEGORIES if name in groups] + [name for name in groups if name not in CATEGORIES]
    shape, drawn, won, high = hello.reference, [], [], 0
    medians = {(category, name): hello.middle("deployment", shape, name, groups[category])
               for category in names for name in hello.contenders}
    high = max((value for value in medians.values() if value is not None and math.isfinite(value)), default=1)
    for category in names:
        rows = []
        for name in hello.contenders:
            value = medians[category, name]
            if value is not None:
                rows.append((name, hello.title[name], value, "half or more failed" if math.isinf(value) else ""))
        finite = [row for row in rows if math.isfinite(row[2])]
        if not finite:
            continue
        best = min(finite, key=lambda row: row[2])
        won.append((category, best[0]))
        title = CATEGORY_TITLES.get(category, category)
        drawn.append(figure(f"{title} ({plural(len(groups[category]), 'image')}): soonest {said(best[1])}, {seconds(best[2])}",
                            plots.bars(rows, palette, f"Median seconds until ready, {title}, {shape}", "s", high)))
    if not drawn:
        return ""
    ours = [category for category, name in won if plots.own(name)]
    lost = [f"{CATEGORY_TITLES.get(category, category).lower()} ({said(hello.title[name])})" for category, name in won if not plots.own(name)]
    finding = f"At {shape}, a driver of Lazuli has the lowest median in {len(ours)} of {len(won)} categories"
    if lost:
        finding += f"; not in {joined(lost)}"
    rows = []
    for entry in hello.shapes:
        if entry["name"] == shape:
            continue
        rows.append(escape(entry["name"]))
        for category in names:
            values = [hello.middle("deployment", entry["name"], name, groups[category]) for name in hello.contenders]
            if any(value is not None for value in values):
                best_value = min(value for value in values if value is not None)
                rows.append([escape(CATEGORY_TITLES.get(category, category))] +
                            [(seconds(value), "best" if value == best_value else "") for value in values])
    return section("Categories", finding, paragraph(f"Median seconds of the deployment cycle at {escape(shape)}; all bars have the same scale.", "note"),
                   figures(drawn), table(["Other networks, median"] + [escape(hello.title[name]) for name in hello.contenders], rows, "wide")
                   if rows else "", id_="categories")


def network_section(hello, palette):
    if len(hello.shapes) < 2:
        return ""
    ticks = [shape["name"] for shape in hello.shapes]
    series = []
    for name in hello.contenders:
        points = [(index, hello.middle("deployment", shape, name)) for index, shape in enumerate(ticks)]
        series.append((name, hello.title[name], [point for point in points if point[1] is not None]))
    growth = []
    for name in [hello.lazuli, hello.baseline]:
        if name:
            values = [hello.middle("deployment", shape, name) for shape in ticks]
            values = [value for value in values if value is not None and math.isfinite(value)]
            if values:
                growth.append(f"from {number(min(values))} to {number(max(values))} s with {said(hello.title[name])}")
    picture = plots.lines(series, palette, "Median seconds until ready by network", "", "median seconds until ready (log scale)",
                          ticks=ticks, logy=True, width=460, height=330)
    return section("Networks", f"Between the networks, medians go {joined(growth)}" if growth else "Medians by network",
                   figures([figure("Median deployment cycle by network", picture),
                            f"<div class='beside'>{network_table(hello, 'deployment')}</div>"]), id_="networks")


def cost_section(hello, palette):
    shape = hello.reference
    fields = [("bytes", 1e6, "MB", "MB fetched", megabytes), ("requests", 1, "", "Requests", whole),
              ("cpu_s", 1, "s", "CPU seconds", number),
              ("rss_bytes", 2 ** 20, "MiB", "Memory of the daemons", megabytes)]
    drawn = []
    for field, scale, unit, title, form in fields:
        rows = []
        for name in hello.contenders:
            value = hello.typical(field, shape, name)
            if value is not None:
                rows.append((name, hello.title[name], value / scale, ""))
        if rows:
            least = min(rows, key=lambda row: row[2])
            drawn.append(figure(f"{title}: least with {said(least[1])}, {form(least[2])} {unit}".rstrip(),
                                plots.bars(rows, palette, f"{title}, median, {shape}", unit, form=form)))
    if not drawn:
        return ""
    rows = []
    for entry in hello.shapes:
        rows.append(escape(entry["name"]))
        for name in hello.contenders:
            cells = []
            for field, scale, _, _, form in fields:
                value = hello.typical(field, entry["name"], name)
                all_ = [one / scale for image in hello.order for one in hello.values(field, entry["name"], name, image)]
                cells.append(f"{form(value / scale)}<small>{form(min(all_))}–{form(max(all_))}</small>"
                             if value is not None else "–")
            steps = [median(start["pull_s"] for image in hello.order
                            for start in hello.starts.get((entry["name"], name, image), []) if start.get("pull_s") is not None),
                     median(start["create_s"] - start["pull_s"] for image in hello.order
                            for start in hello.starts.get((entry["name"], name, image), [])
                            if start.get("create_s") is not None and start.get("pull_s") is not None),
                     median(start["ready_s"] - start["create_s"] for image in hello.order
                            for start in hello.starts.get((entry["name"], name, image), []) if start.get("create_s") is not None)]
            pushed = median(push["bytes"] for key, pushes in hello.pushes.items()
                            if key[:2] == (entry["name"], name) for push in pushes if push.get("bytes") is not None)
            if any(cell != "–" for cell in cells):
                rows.append([escape(hello.title[name])] + cells + [number(step) for step in steps]
                            + [megabytes(pushed / 1e6) if pushed is not None else "–"])
    head = ["Median", "MB fetched", "requests", "CPU s", "memory MiB", "pull s", "create s", "run s", "MB pushed"]
    fetched = {name: hello.typical("bytes", shape, name) for name in hello.contenders}
    finding = "What a start takes"
    if hello.lazuli and hello.baseline and fetched[hello.lazuli] and fetched[hello.baseline]:
        finding = (f"At {shape}, a median start fetches {megabytes(fetched[hello.lazuli] / 1e6)} MB with {said(hello.title[hello.lazuli])}"
                   f" and {megabytes(fetched[hello.baseline] / 1e6)} MB with {said(hello.title[hello.baseline])}")
    return section("What a start takes", finding, paragraph(
        f"Medians over images of starts that worked, at {escape(shape)}; in the table small: least and greatest. The time is split into"
        " the pull, the creation of the container after it, and the run until ready; these are medians of their own, so they do"
        " not add up.", "note"), figures(drawn), table(head, rows, "wide"), id_="costs")


def image_sections(hello):
    parts = []
    for shape in hello.shapes:
        name = shape["name"]
        rows, failures, last, count, won = [], [], None, 0, {}
        for image in hello.order:
            values = {contender: hello.ready(name, contender, image) for contender in hello.contenders}
            if all(value is None for value in values.values()):
                continue
            count += 1
            if hello.category(image) != last:
                last = hello.category(image)
                rows.append(escape(CATEGORY_TITLES.get(last, last)))
            best = min(value for value in values.values() if value is not None)
            cells = []
            for contender in hello.contenders:
                key = name, contender, image
                errors, value = hello.errors.get(key, []), values[contender]
                tried = len(errors) + len(hello.starts.get(key, []))
                for error in errors:
                    text = f"{image}, {hello.title[contender]}: {error}"
                    if text not in failures:
                        failures.append(text)
                if value is None:
                    cells.append("–")
                elif math.isinf(value):
                    cells.append((f"failed<small>{plural(tried, 'round')}</small>", "failed", "; ".join(sorted(set(errors)))))
                else:
                    all_ = hello.values("ready_s", name, contender, image)
                    small = f"<small>{number(min(all_))}–{number(max(all_))}</small>" if len(all_) > 1 else ""
                    if errors:
                        small += f"<small class='failed'>{len(errors)} of {tried} failed</small>"
                    if value == best:
                        won[contender] = won.get(contender, 0) + 1
                    cells.append((number(value) + small, "best" if value == best else "", "; ".join(sorted(set(errors)))))
            size = hello.images[image].get("bytes")
            rows.append([escape(image), megabytes(size / 1e6) if size else "–"] + cells)
        most = sorted(won.items(), key=lambda pair: -pair[1])
        finding = f"{name}: soonest " + joined(f"{said(hello.title[contender])} on {number_of} of {count}" for contender, number_of in most) \
            if most else name
        listed = ("<details open><summary>" + escape(plural(len(failures), "failure") + " at " + name) + "</summary><ul class='failures'>"
                  + "".join(f"<li>{escape(text)}</li>" for text in failures) + "</ul></details>") if failures else ""
        head = ["Image", "MB"] + [escape(hello.title[contender]) for contender in hello.contenders]
        unit = "Seconds until ready (pull and run): median" + (", small: fastest to slowest round" if hello.rounds() > 1 else "") \
            + ". MB: the OCI image, compressed. Bold: the soonest of the row."
        if not hello.starts:
            finding = f"{name}: every start failed"
        parts.append(section("Every image", finding, paragraph(unit, "note"), table(head, rows, "wide images"), listed,
                             id_=f"images-{hello.shapes.index(shape) + 1}"))
    return parts


def noise(hello):
    result, spreads = hello.result, hello.spreads()
    text = f"Measured {escape(result.get('date') or 'at an unknown date')} on a machine with {escape(machine_text(result.get('machine', {})) or 'unknown parts')}; "
    text += f"{plural(hello.rounds(), 'round')} of every start. "
    if spreads:
        ordered = sorted(spreads)
        text += (f"Between the rounds of the same start, slowest − fastest is {100 * statistics.median(ordered):.0f} % of the median"
                 f" for half of the starts, {100 * ordered[int(0.9 * (len(ordered) - 1))]:.0f} % or less for nine of ten,"
                 f" {100 * ordered[-1]:.0f} % at most: smaller differences say little.")
    else:
        text += "With one round nothing is known of the spread: small differences say little."
    return text


def method_section(hello):
    result = hello.result
    rows = [[escape(hello.title[name]), escape(hello.version[name]) or "–", str(len({key[2] for key in hello.starts if key[1] == name})),
             str(sum(len(errors) for key, errors in hello.errors.items() if key[1] == name))] for name in hello.contenders]
    missing = result.get("missing", {})
    return section("How it was measured", f"{plural(hello.rounds(), 'round')}, {plural(len(hello.order), 'image')},"
                   f" {plural(len(hello.contenders), 'contender')}, {plural(len(hello.shapes), 'network')}",
                   paragraph(noise(hello)),
                   paragraph("Deployment cycle: from the begin of the pull until the container is ready. Development cycle: that, and the"
                             " push of the image before it. A failed start counts as never ready in medians and curves; ratios"
                             " are of images that both sides start."),
                   table(["Contender", "version", "images started", "failed starts"], rows),
                   ("<p>Not in this comparison: " + "; ".join(f"{escape(name)} ({escape(reason)})" for name, reason in missing.items())
                    + ".</p>") if missing else "",
                   paragraph("Network: " + escape(result["shaper"]) + ".") if result.get("shaper") else "",
                   paragraph("containerd " + escape(result["containerd"]) + ".") if result.get("containerd") else "",
                   f"<pre>{escape(result['command'])}</pre>" if result.get("command") else "", id_="method")


# ---- the other results ----

def fs_sections(result, palette):
    tests = {}
    for entry in result["tests"]:
        tests.setdefault(entry["test"], {})[entry["side"]] = entry
    rows, medians = [], {}
    for test, sides in tests.items():
        native = sides.get("native") or sides.get("runc")
        of = "" if "native" in sides or native is None else ", runc"
        unit = (native or next(iter(sides.values()))).get("unit") or ""
        sooner = unit in ("s", "ms", "µs", "us", "ns")
        cells = [escape(test), f"{number(median(native['values']))}<small>{escape(unit + of)}</small>" if native and native["values"] else "–"]
        published = next((figures_ for names, figures_ in PUBLISHED if test in names), {})
        for side in ("fanotify", "fuse"):
            values = sides.get(side, {}).get("values", [])
            base = native["values"] if native else []
            if values and len(values) == len(base):
                ratios = [(b / v if sooner else v / b) for v, b in zip(values, base) if v and b]
            elif values and base:
                ratios = [median(base) / median(values) if sooner else median(values) / median(base)]
            else:
                ratios = []
            if ratios:
                medians.setdefault(side, {})[test] = median(ratios)
            spread = f"<small>{ratio(min(ratios))}–{ratio(max(ratios))}</small>" if len(ratios) > 1 else ""
            cells += [number(median(values)) if values else "–", (ratio(median(ratios)) + spread, "strong") if ratios else "–",
                      published.get(side, "–")]
        rows.append(cells)
    slow = {side: min(found.items(), key=lambda pair: pair[1]) for side, found in medians.items() if found}
    titles = {"fanotify": "the fanotify driver", "fuse": "FUSE"}
    finding = "With everything local, the slowest test has " + joined(
        f"{ratio(value)} of native speed with {titles[side]} ({test})" for side, (test, value) in slow.items()) if slow \
        else "File system, everything local"
    return [section("File system", finding, paragraph("Speed as a ratio to the same on the disk’s own file system, or in a container of runc’s on it where that is said: 1 is the same, more is faster."
                    " Beside each the ratio that is published for EROFS over fscache and for FUSE. Small: unit, least and greatest of the rounds. "
                    + escape(f"{result.get('date', '')}; {machine_text(result.get('machine', {}))}.".lstrip("; ")), "note"),
                    table(["Test", "native", "fanotify", "÷ native", "published", "FUSE", "÷ native", "published"], rows, "wide"), id_="fs")]


def ratio(value):
    return f"{value:.2f}"


def density_sections(result, palette):
    parts, rows, findings = [], [], []
    kinds = list(dict.fromkeys(point["kind"] for point in result["points"]))
    for kind in kinds:
        points = sorted((point for point in result["points"] if point["kind"] == kind), key=lambda point: point["count"])
        parts.append(figure(f"{kind.capitalize()}: {number(points[-1]['seconds'])} s for {points[-1]['count']:,}",
                            plots.lines([("lazuli", kind, [(point["count"], point["seconds"]) for point in points])], palette,
                                        f"Seconds by number of {kind}", f"number of {kind}", "seconds in total", height=260)))
        processes = list(dict.fromkeys(name for point in points for name in point.get("rss_bytes", {})))
        if processes:
            parts.append(figure(f"{kind.capitalize()}: " + joined(
                f"{name} {number(points[-1]['rss_bytes'][name] / 2**20)} MiB" for name in processes
                if name in points[-1].get("rss_bytes", {})) + f" at {points[-1]['count']:,}",
                plots.lines([(name if name in palette.of else "worker", name, [(point["count"], point["rss_bytes"][name] / 2**20) for point in points
                              if name in point.get("rss_bytes", {})]) for name in processes], palette,
                            f"Memory by number of {kind}", f"number of {kind}", "resident memory, MiB", height=260, unit="MiB")))
        for point in points:
            rows.append([escape(kind), f"{point['count']:,}", number(point["seconds"]), number(1000 * point["seconds"] / point["count"]) if point["count"] else "–"]
                        + [number(point.get("rss_bytes", {}).get(name, math.nan) / 2**20) for name in ("keeper", "worker")])
        findings.append(f"{points[-1]['count']:,} {kind} in {number(points[-1]['seconds'])} s")
    return [section("Density", f"One node: {joined(findings)}", figures(parts),
                    table(["", "count", "s", "ms each", "keeper MiB", "worker MiB"], rows), id_="density")]


def update_sections(result, palette):
    groups = {}
    for entry in result["updates"]:
        groups.setdefault((entry["from"], entry["to"], entry["contender"]), []).append(entry)
    rows, typical = [], {}
    for (before, after, contender), entries in groups.items():
        worked = [entry for entry in entries if not entry.get("error")]
        errors = "; ".join(sorted({entry["error"] for entry in entries if entry.get("error")}))
        row = [escape(f"{before} → {after}"), (escape(palette.title(contender)), "name")]
        if not worked:
            rows.append(row + [("failed", "failed", errors)] + ["–"] * 3)
            continue
        for field, form in [("pushed_bytes", millions), ("push_s", number), ("pulled_bytes", millions), ("ready_s", number)]:
            row.append((over_rounds([entry[field] for entry in worked], form), "", errors))
        if errors:
            row[-1] = (row[-1][0] + f"<small class='failed'>{len(entries) - len(worked)} of {len(entries)} failed</small>", "", errors)
        rows.append(row)
        typical.setdefault(contender, []).append(median(entry["pulled_bytes"] for entry in worked))
    named = [f"{millions(median(values))} MB with {said(palette.title(name))}" for name, values in typical.items()]
    return [section("Update", f"An update pulls a median of {joined(named)}" if named else "Updates",
                    paragraph("A node has the first image and starts the second; the registry has the first one’s blobs too."
                              " Median; small: least and greatest of several rounds.", "note"),
                    table(["Update", ("contender", "name"), "MB pushed", "push s", "MB pulled", "ready s"], rows), id_="update")]


def millions(value):
    return megabytes(value / 1e6)


def over_rounds(values, form):
    spread = f"<small>{form(min(values))}–{form(max(values))}</small>" if len(values) > 1 else ""
    return form(median(values)) + spread


def scale_sections(result, palette):
    parts, findings, failures = [], [], []
    for operation in dict.fromkeys(point["operation"] for point in result["points"]):
        several = operation + ("es" if operation.endswith("sh") else "s")
        values = {}
        for point in result["points"]:
            if point["operation"] != operation:
                continue
            if point.get("seconds") is None:
                failures.append(f"{point['parallel']} {several}, {palette.title(point['contender'])}: {point.get('error') or 'no figures'}")
            else:
                values.setdefault(point["contender"], {}).setdefault(point["parallel"], []).append(point["seconds"])
        series = {name: [(parallel, median(all_)) for parallel, all_ in sorted(points.items())] for name, points in values.items()}
        if not series:
            continue
        most = max(parallel for points in series.values() for parallel, _ in points)
        ends = {name: dict(points)[most] for name, points in series.items() if most in dict(points)}
        best = min(ends, key=ends.get)
        parts.append(figure(f"{operation.capitalize()}, {most} at once: soonest {said(palette.title(best))}, {number(ends[best])} s",
                            plots.lines([(name, palette.title(name), points) for name, points in series.items()], palette,
                                        f"Seconds by number of {several}", "at the same time", "seconds until all are done")))
        findings.append(f"{most} {several} at once take {number(ends[best])} s with {said(palette.title(best))}"
                        + (f" and {number(ends[BASELINE])} s with {said(palette.title(BASELINE))}"
                           if BASELINE in ends and BASELINE != best else ""))
    listed = "<ul class='failures'>" + "".join(f"<li>{escape(text)}</li>" for text in failures) + "</ul>" if failures else ""
    return [section("Scale", "; ".join(findings) or "Every pull and push failed", figures(parts), listed, id_="scale")]


def build_sections(result, palette):
    groups, least = {}, {}
    for entry in result["builds"]:
        image = entry.get("image") or result.get("image") or ""
        groups.setdefault(image, {}).setdefault(entry["tool"], []).append(entry)
    rows = []
    for image, tools in groups.items():
        if image:
            rows.append(escape(image))
        for tool, entries in tools.items():
            row = [escape(tool)]
            for field in ("cpu_s", "wall_s", "rss_mib", "mb"):
                values = [entry[field] for entry in entries if entry.get(field) is not None]
                row.append(over_rounds(values, number) if values else "–")
                if field == "cpu_s" and values:
                    least[image] = min(least.get(image, (INFINITE, "")), (median(values), tool))
            rows.append(row)
    finding = "Fewest CPU seconds: " + joined(f"{tool}{' for ' + image if image else ''} ({number(value)})"
                                              for image, (value, tool) in least.items())
    return [section("Build", finding if least else "Conversions",
                    paragraph("CPU: user and system time of the whole command. Median; small: least and greatest of several rounds.", "note"),
                    table(["Tool", "CPU s", "wall s", "peak MiB", "MB written"], rows), id_="build")]


SECTIONS = {"lazuli-bench/hello/1": hello_sections, "lazuli-bench/update/1": update_sections,
            "lazuli-bench/scale/1": scale_sections, "lazuli-bench/fs/1": fs_sections,
            "lazuli-bench/density/1": density_sections, "lazuli-bench/build/1": build_sections}

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c2330;--soft:#5a6472;--line:#e3e6eb;--lapis:#1d3fb8;--tint:#f4f6fb;--bad:#9b2c1f}
@media screen and (prefers-color-scheme:dark){:root{--bg:#0d1117;--ink:#e3e8ef;--soft:#9aa5b3;--line:#262d37;--lapis:#8eacff;--tint:#141b27;--bad:#f0938a}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,'Segoe UI','Helvetica Neue',Arial,sans-serif}
main,header,footer{max-width:1240px;margin:0 auto;padding:0 20px}
header{padding-top:40px}
h1{font-size:clamp(1.5rem,1.1rem + 1.8vw,2.2rem);line-height:1.2;margin:0 0 .5rem;max-width:34ch;text-wrap:balance;letter-spacing:-.01em}
header p{color:var(--soft);max-width:85ch;margin:.4rem 0}
nav{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:1.2rem 0 0;padding:.7rem 0;border-top:1px solid var(--line);border-bottom:1px solid var(--line);font-size:.9rem}
a{color:var(--lapis);text-decoration:none}a:hover{text-decoration:underline}
section{padding:2.2rem 0 .6rem;border-bottom:1px solid var(--line)}
section:last-child{border:0}
.topic{margin:0;color:var(--lapis);font-size:.85rem;font-weight:600}
h2{font-size:clamp(1.12rem,1rem + .6vw,1.4rem);line-height:1.3;margin:.1rem 0 .7rem;max-width:60ch;text-wrap:balance}
.note{color:var(--soft);font-size:.9rem;max-width:85ch;margin:.4rem 0 1rem}
section>p{max-width:85ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));gap:12px;margin:1rem 0 1.4rem}
.tile{background:var(--tint);border-left:3px solid var(--lapis);padding:.8rem 1rem;border-radius:0 4px 4px 0;display:flex;flex-direction:column;gap:.15rem}
.tile b{font-size:1.9rem;line-height:1.1;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{font-size:.9rem;line-height:1.35}.tile i{font-style:normal;color:var(--soft);font-size:.82rem;margin-top:auto;padding-top:.25rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:1.6rem 2.2rem;margin:1rem 0 1.4rem}
.figures.three{grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));column-gap:1.8rem}
figure,.beside{margin:0;min-width:0;max-width:540px;grid-row:span 2}
@supports (grid-template-rows:subgrid){figure{display:grid;grid-template-rows:subgrid;row-gap:0}.figures{row-gap:0}.figures figure{margin-bottom:1.7rem}}
figcaption{align-self:end;font-size:.93rem;line-height:1.35;font-weight:600;margin-bottom:.5rem;max-width:62ch}
figure svg{display:block;width:100%;height:auto;overflow:visible}
.scroll{overflow-x:auto;margin:.6rem 0 1.2rem;max-width:100%}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;line-height:1.3}
table.wide{width:100%}
th,td{padding:.38rem .6rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line);white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal;min-width:4.6em;line-height:1.25}
tbody th{font-weight:500}
.name{text-align:left}
th.name{position:sticky;left:0;background:var(--bg)}
tr.group th{text-align:left;color:var(--soft);font-weight:600;padding-top:1em;font-size:.95em;white-space:normal}
tr.group span{position:sticky;left:.6rem}
td small{display:block;color:var(--soft);font-size:.87em;font-weight:400}
td.best,td.strong{font-weight:700}
.failed,td small.failed{color:var(--bad)}
.failures,details{font-size:.86rem;color:var(--soft)}.failures{margin:.3rem 0;padding-left:1.2rem;overflow-wrap:anywhere}
pre{background:var(--tint);padding:.8rem 1rem;overflow-x:auto;font-size:.84rem;border-radius:4px}
footer{color:var(--soft);font-size:.85rem;padding-bottom:40px}
@media (max-width:520px){main,header,footer{padding-left:14px;padding-right:14px}header{padding-top:22px}table{font-size:.82rem}th,td{padding:.34rem .45rem}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:.6rem .7rem}.tile b{font-size:1.45rem}.tile span{font-size:.82rem}table.images th.name,table.wide th.name{max-width:118px;white-space:normal}}
@media print{body{font-size:10pt}.scroll{overflow:visible}figure,tr,.tile{break-inside:avoid}h2,.topic,figcaption,thead{break-after:avoid}nav{display:none}
table{font-size:7.5pt}th,td{padding:2pt 3pt;white-space:normal}th.name{position:static}section{padding-top:14pt}.figures,.figures.three{grid-template-columns:1fr 1fr;column-gap:16pt}
.tiles{grid-template-columns:repeat(4,1fr)}.tile b{font-size:16pt}h1{font-size:20pt}h2{font-size:13pt}tr.group{break-after:avoid}}
"""


def page(results, palette):
    hello = next((Hello(result) for result in results if result["schema"] == "lazuli-bench/hello/1"), None)
    parts = []
    for result in results:
        parts += SECTIONS[result["schema"]](result, palette)
    if hello and hello.shapes:
        title = (f"Starts of {plural(len(hello.order), 'image')}, {plural(len(hello.contenders), 'way')} to bring them,"
                 f" {plural(len(hello.shapes), 'network')}")
        lead = noise(hello)
    else:
        title, lead = "Results of Lazuli’s benches", ""
        for result in results:
            machine = machine_text(result.get("machine", {}))
            if machine and not lead:
                lead = f"Measured {escape(result.get('date', ''))} on a machine with {escape(machine)}."
    links, ids = [], {}
    for index, part in enumerate(parts):
        if not part.startswith("<section id='"):
            continue
        identity = part.split("'", 2)[1]
        topic = part.split("<p class='topic'>", 1)[1].split("</p>", 1)[0]
        ids[identity] = ids.get(identity, 0) + 1
        if ids[identity] > 1:
            # Two results of the same schema.
            parts[index] = part.replace(f"id='{identity}'", f"id='{identity}-{ids[identity]}'", 1)
            identity = f"{identity}-{ids[identity]}"
        links.append((identity, topic))
    seen = set()
    shown = "".join(f"<a href='#{identity}'>{topic}</a>" for identity, topic in links
                    if topic not in seen and not seen.add(topic))
    return f"""<!DOCTYPE html>
<html lang='en'>
<head>
<meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>{escape(title)}</title>
<style>{STYLE}{palette.style()}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{lead}</p>
<nav>{shown}</nav>
</header>
<main>
{chr(10).join(parts)}
</main>
<footer><p>Made by lazuli-bench report from {plural(len(results), 'result')}. Medians unless said otherwise.</p></footer>
</body>
</html>
"""


# ---- the README's pictures ----

def pictures(hello, palette):
    shape = hello.reference
    style = palette.style()
    foot = [f"{plural(len(hello.order), 'image')}, median of {plural(hello.rounds(), 'round')}, {shape}, nothing of an image on the node;"
            f" {hello.result.get('date', '')}".rstrip("; "), machine_text(hello.result.get("machine", {}))]
    curves = []
    for name in hello.contenders:
        values = hello.cycles("deployment", shape, name)
        if values:
            middle = half_ready(value for value, _ in values)
            curves.append((name, f"{hello.title[name]}, {seconds(middle)}", values, len(values)))
    ours, theirs = (hello.middle("deployment", shape, name) if name else None for name in (hello.lazuli, hello.baseline))
    heading = ["Share of images that are ready, by time"]
    if ours is not None and theirs is not None:
        heading = [f"Half of the images are ready within {seconds(ours)} with {said(hello.title[hello.lazuli])},"
                   f" {seconds(theirs)} with {said(hello.title[hello.baseline])}"]
        if plots.width_of(heading[0], 16, True) > 715:
            heading = [f"Half of the images are ready within {seconds(ours)} with Lazuli, {seconds(theirs)} with {hello.baseline}"]
    heading.append("Share of images whose container is ready, by seconds since the pull began; beside the names: medians")
    cycle = plots.cdf(curves, palette, heading[0], "seconds since the pull began (log scale)", width=760, height=470,
                      style=style, heading=heading, foot=foot, size=14)
    rows = []
    for name in hello.by_speed(shape):
        fetched = hello.typical("bytes", shape, name)
        rows.append((name, hello.title[name], (hello.middle("deployment", shape, name), fetched / 1e6 if fetched is not None else None)))
    heading = ["What a start takes"]
    fetched = {name: values[1] for name, _, values in rows}
    if fetched.get(hello.lazuli) and fetched.get(hello.baseline):
        heading = [f"A start fetches {megabytes(fetched[hello.lazuli])} MB with Lazuli, {megabytes(fetched[hello.baseline])} MB with {hello.baseline}"]
    takes = plots.twin_bars(rows, palette, heading[0], [("seconds until ready, median", "s", number), ("MB fetched until ready, median", "MB", megabytes)],
                            style, heading, foot)
    return {"deployment-cycle.svg": cycle, "what-it-takes.svg": takes}
