"""Makes one HTML page, the README's pictures, and tables for documents, from results of the other verbs.

The page needs nothing but itself: its style and its plots are inside, and there are no scripts.
What the results look like is in schema.md.
"""

import argparse
import json
import sys
from pathlib import Path

from . import hello_costs, hello_times, markdown, others, words
from .hello import Hello
from .page import page
from .palette import Palette
from .pictures import pictures

USAGE = "lazuli-bench report [--html FILE] [--svg DIRECTORY] [--markdown] RESULT.json..."


def hello_sections(result, palette):
    """The sections of the result that has most of them."""
    hello = Hello(result)
    return [section for section in [*hello_times.sections(hello, palette), *hello_costs.sections(hello, palette)] if section]


# The modules that make the sections of a result, in the order of the page.
SECTIONS = {"lazuli-bench/hello/1": hello_sections, "lazuli-bench/update/1": others.update,
            "lazuli-bench/scale/1": others.scale, "lazuli-bench/fs/1": others.fs,
            "lazuli-bench/density/1": others.density, "lazuli-bench/build/1": others.build}


class Refused(Exception):
    """Why there is no report."""


def main(argv):
    """Write what the options ask for; return the status of the program."""
    parser = argparse.ArgumentParser(prog="lazuli-bench report", usage=USAGE, description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page; standard output when no option is given")
    parser.add_argument("--svg", type=Path, metavar="DIRECTORY", help="where the README's pictures go")
    parser.add_argument("--markdown", action="store_true", help="print hello's tables for documents")
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    options = parser.parse_args(argv)
    try:
        results = read(options.results)
        if options.svg:
            write_pictures(options.svg, results)
        if options.markdown:
            sys.stdout.write(markdown.tables(hello_of(results, "--markdown")))
    except Refused as refused:
        print(f"lazuli-bench report: {refused}", file=sys.stderr)
        return 2
    if options.html or not (options.svg or options.markdown):
        content = whole_page(results)
        if options.html:
            options.html.write_text(content, encoding="utf-8")
        else:
            sys.stdout.write(content)
    return 0


def read(paths):
    """The results by schema, in the order of the page, whatever the order of the files."""
    results = {}
    for path in paths:
        try:
            result = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: {error}") from error
        schema = result.get("schema") if isinstance(result, dict) else None
        if schema not in SECTIONS:
            raise Refused(f"{path}: schema {schema!r} is not known; known are {', '.join(SECTIONS)}")
        if schema in results:
            raise Refused(f"{path}: a second result of {schema}")
        # The day is enough.
        results[schema] = result | {"date": result["date"][:10]}
    return {schema: results[schema] for schema in SECTIONS if schema in results}


def whole_page(results):
    """The page of all results."""
    palette = Palette(results.values())
    sections = [section for schema, result in results.items() for section in SECTIONS[schema](result, palette)]
    return page(len(results), sections, *title_and_lead(results), palette)


def title_and_lead(results):
    """What the page is about."""
    if "lazuli-bench/hello/1" not in results:
        result = next(iter(results.values()))
        return ("Results of Lazuli’s benches",
                f"Measured {words.escape(result['date'])} on a machine with {words.escape(words.machine_text(result['machine']))}.")
    hello = Hello(results["lazuli-bench/hello/1"])
    return (f"Starts of {words.plural(len(hello.order), 'image')}, {words.plural(len(hello.contenders), 'way')} to bring them,"
            f" {words.plural(len(hello.shapes), 'network')}", hello_costs.noise(hello))


def write_pictures(directory, results):
    """The README's pictures, as files."""
    drawn = pictures(hello_of(results, "--svg"), Palette(results.values()))
    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in drawn.items():
        (directory / name).write_text(picture, encoding="utf-8")


def hello_of(results, option):
    """The result of hello, which an option needs."""
    if "lazuli-bench/hello/1" not in results:
        raise Refused(f"{option} needs a result of lazuli-bench/hello/1")
    return Hello(results["lazuli-bench/hello/1"])
