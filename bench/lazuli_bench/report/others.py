"""Sections of the report for all verbs but `hello`, one for each."""

from .curves import lines
from .page import Cell, figure, figures, make_section, note, table
from .palette import BASELINE
from .words import escape, joined, machine_text, median, megabytes, number, over_rounds, said

# Ratios to native that are published for file systems of this kind, by test: EROFS over fscache,
# and FUSE.
READ, METADATA = {"fanotify": "0.85–0.93", "fuse": "0.70"}, {"fanotify": "1.82", "fuse": "0.33"}
PUBLISHED = {"seq read": READ, "rand read": READ, "find": METADATA, "ls -lR": METADATA,
             "compile": {"fanotify": "1.0", "fuse": "0.78"}}
DRIVERS = {"fanotify": "the fanotify driver", "fuse": "FUSE"}
SEVERAL = {"pull": "pulls", "push": "pushes"}
PROCESSES = ("keeper", "worker")


def titles_of(result):
    """The titles of contenders."""
    return {contender["name"]: contender["title"] for contender in result["contenders"]}


def update(result, palette):
    """What the next version of an image costs."""
    titles, groups, pulled = titles_of(result), {}, {}
    for entry in result["updates"]:
        groups.setdefault((entry["from"], entry["to"], entry["contender"]), []).append(entry)
    rows = []
    for (before, after, name), entries in groups.items():
        worked = [entry for entry in entries if "error" not in entry]
        rows.append([escape(f"{before} → {after}"), Cell(escape(titles[name]), "name"), *update_cells(entries, worked)])
        if worked:
            pulled.setdefault(name, []).append(median(entry["pulled_bytes"] for entry in worked))
    named = [f"{megabytes(median(sizes))} MB with {said(titles[name])}" for name, sizes in pulled.items()]
    return [make_section("update", "Update", f"An update pulls a median of {joined(named)}" if named else "Updates",
                         note("A node has the first image and starts the second; the registry has the first one’s blobs too."
                              " Median; small: least and greatest of several rounds."),
                         table(["Update", Cell("contender", "name"), "MB pushed", "push s", "MB pulled", "ready s"], rows))]


def update_cells(entries, worked):
    """The rounds of one update by one contender, of which some worked."""
    errors = "; ".join(sorted({entry["error"] for entry in entries if "error" in entry}))
    if not worked:
        return [Cell("failed", "failed", errors)] + ["–"] * 3
    texts = [over_rounds([entry[field] for entry in worked], form) for field, form in
             [("pushed_bytes", megabytes), ("push_s", number), ("pulled_bytes", megabytes), ("ready_s", number)]]
    if errors:
        texts[-1] += f"<small class='failed'>{len(entries) - len(worked)} of {len(entries)} failed</small>"
    return [Cell(text, "", errors) for text in texts]


def scale(result, palette):
    """Many pulls or pushes at the same time."""
    titles, findings, pictures, failures = titles_of(result), [], [], []
    for operation in dict.fromkeys(point["operation"] for point in result["points"]):
        points, several = [point for point in result["points"] if point["operation"] == operation], SEVERAL[operation]
        failures += [f"{point['parallel']} {several}, {titles[point['contender']]}: {point['error']}"
                     for point in points if "error" in point]
        series = {}
        for point in points:
            if "error" not in point:
                series.setdefault(point["contender"], {})[point["parallel"]] = point["seconds"]
        if not series:
            continue
        most = max(parallel for found in series.values() for parallel in found)
        last = {name: found[most] for name, found in series.items() if most in found}
        best = min(last, key=last.get)
        pictures.append(figure(f"{operation.capitalize()}, {most} at once: soonest {said(titles[best])}, {number(last[best])} s",
                               lines([(name, titles[name], found.items()) for name, found in series.items()], palette,
                                     f"Seconds by number of {several}", "at the same time", "seconds until all are done")))
        named = [best] + [BASELINE] * (BASELINE in last and best != BASELINE)
        findings.append(f"{most} {several} at once take " + joined(f"{number(last[name])} s with {said(titles[name])}" for name in named))
    listed = "<ul class='failures'>" + "".join(f"<li>{escape(text)}</li>" for text in failures) + "</ul>" if failures else ""
    return [make_section("scale", "Scale", "; ".join(findings) or "Every pull and push failed", figures(pictures), listed)]


def fs(result, palette):
    """Speeds when everything is local, as ratios to native."""
    tests = {}
    for entry in result["tests"]:
        tests.setdefault(entry["test"], {})[entry["side"]] = entry
    rows, slowest = [], {}
    for test, sides in tests.items():
        base = sides.get("native") or sides["runc"]
        unit = base["unit"] if "native" in sides else f"{base['unit']}, runc"
        row = [escape(test), f"{number(median(base['values']))}<small>{escape(unit)}</small>"]
        for side in DRIVERS:
            ratios = [speed / native for speed, native in zip(sides[side]["values"], base["values"])] if side in sides else []
            row += speed_cells(sides[side]["values"], ratios) if ratios else ["–", "–"]
            row.append(PUBLISHED.get(test, {}).get(side, "–"))
            if ratios:
                slowest[side] = min(slowest.get(side, (float("inf"), "")), (median(ratios), test))
        rows.append(row)
    finding = "With everything local, the slowest test has " + joined(
        f"{two_digits(ratio)} of native speed with {DRIVERS[side]} ({test})" for side, (ratio, test) in slowest.items())
    return [make_section("fs", "File system", finding, note(
        "Speed as a ratio to the same on the disk’s own file system, or in a container of runc’s on it where that is said:"
        " 1 is the same, more is faster."
        " Beside each the ratio that is published for EROFS over fscache and for FUSE. Small: unit, least and greatest of the rounds. "
        + escape(f"{result['date']}; {machine_text(result['machine'])}.")),
        table(["Test", "native", "fanotify", "÷ native", "published", "FUSE", "÷ native", "published"], rows, "wide"))]


def speed_cells(speeds, ratios):
    """A side's speed, and its ratio to native."""
    return [number(median(speeds)), Cell(over_rounds(ratios, two_digits), "strong")]


def two_digits(ratio):
    """A ratio of speeds."""
    return f"{ratio:.2f}"


def density(result, palette):
    """Many mounts and containers on one node."""
    pictures, rows, findings = [], [], []
    for kind in dict.fromkeys(point["kind"] for point in result["points"]):
        points = sorted((point for point in result["points"] if point["kind"] == kind), key=lambda point: point["count"])
        pictures += density_figures(kind, points, palette)
        rows += [[escape(kind), f"{point['count']:,}", number(point["seconds"]), number(1000 * point["seconds"] / point["count"])]
                 + [number(mebibytes(point, process)) for process in PROCESSES] for point in points]
        findings.append(f"{points[-1]['count']:,} {kind} in {number(points[-1]['seconds'])} s")
    return [make_section("density", "Density", f"One node: {joined(findings)}", figures(pictures),
                         table(["", "count", "s", "ms each", "keeper MiB", "worker MiB"], rows))]


def mebibytes(point, process):
    """A process' memory."""
    return point["rss_bytes"][process] / 2**20


def density_figures(kind, points, palette):
    """Time and memory by number of mounts, or of containers."""
    most, below = points[-1], f"number of {kind}"
    memory = joined(f"{process} {number(mebibytes(most, process))} MiB" for process in PROCESSES)
    return [figure(f"{kind.capitalize()}: {number(most['seconds'])} s for {most['count']:,}",
                   lines([("lazuli", kind, [(point["count"], point["seconds"]) for point in points])], palette,
                         f"Seconds by {below}", below, "seconds in total", 260)),
            figure(f"{kind.capitalize()}: {memory} at {most['count']:,}",
                   lines([(process, process, [(point["count"], mebibytes(point, process)) for point in points]) for process in PROCESSES],
                         palette, f"Memory by {below}", below, "resident memory, MiB", 260, "MiB"))]


def build(result, palette):
    """Conversions by image and tool."""
    images = {}
    for entry in result["builds"]:
        images.setdefault(entry["image"], {}).setdefault(entry["tool"], []).append(entry)
    rows, least = [], {}
    for image, tools in images.items():
        rows.append(escape(image))
        for tool, entries in tools.items():
            rows.append([escape(tool)] + [over_rounds([entry[field] for entry in entries], number)
                                          for field in ("cpu_s", "wall_s", "rss_mib", "mb")])
        least[image] = min((median(entry["cpu_s"] for entry in entries), tool) for tool, entries in tools.items())
    finding = "Fewest CPU seconds: " + joined(f"{tool} for {image} ({number(value)})" for image, (value, tool) in least.items())
    return [make_section("build", "Build", finding,
                         note("CPU: user and system time of the whole command. Median; small: least and greatest of several rounds."),
                         table(["Tool", "CPU s", "wall s", "peak MiB", "MB written"], rows))]
