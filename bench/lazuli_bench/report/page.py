"""Elements of the page, and the page."""

from typing import NamedTuple

from .style import STYLE
from .words import escape, plural, unbroken


class Section(NamedTuple):
    """A part of the page, to which the links at its top lead."""

    name: str
    topic: str
    html: str


class Cell(NamedTuple):
    """One of a table, as HTML; `title` is shown when a pointer is above it."""

    html: str
    classes: str = ""
    title: str = ""


def make_section(name, topic, finding, *parts):
    """A section whose heading says what was found."""
    return Section(name, topic, f"<section id='{name}'><p class='topic'>{escape(topic)}</p><h2>{escape(finding)}</h2>"
                   + "\n".join(part for part in parts if part) + "</section>")


def table(head, rows, classes=""):
    """Rows are lists of HTML or of `Cell`, or the HTML of a heading of those that follow."""
    lines = [f"<div class='scroll' tabindex='0'><table{class_of(classes)}>",
             "<thead><tr>" + "".join(cell(content, "th", index) for index, content in enumerate(head)) + "</tr></thead><tbody>"]
    for row in rows:
        if isinstance(row, str):
            lines.append(f"<tr class='group'><th colspan='{len(head)}'><span>{row}</span></th></tr>")
        else:
            lines.append("<tr>" + "".join(cell(content, "td" if index else "th", index) for index, content in enumerate(row)) + "</tr>")
    return "\n".join(lines) + "</tbody></table></div>"


def cell(content, tag, index):
    """One of a row, at this column; the first is the row's name."""
    content = content if isinstance(content, Cell) else Cell(content)
    classes = content.classes if index else f"{content.classes} name".strip()
    title = f" title='{escape(content.title)}'" if content.title else ""
    scope = " scope='row'" if tag == "th" and index == 0 else ""
    return f"<{tag}{scope}{class_of(classes)}{title}>{content.html}</{tag}>"


def class_of(classes):
    """The attribute, when there are any."""
    return f" class='{classes}'" if classes else ""


def network_head(hello):
    """The head of a table whose columns are networks."""
    return [""] + [unbroken(shape) for shape in hello.shapes]


def figure(caption, picture):
    """A picture and what it shows."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def figures(parts):
    """Pictures beside each other."""
    three = " three" if len(parts) % 3 == 0 else ""
    return f"<div class='figures{three}'>" + "\n".join(parts) + "</div>" if parts else ""


def paragraph(text):
    """Text, as HTML."""
    return f"<p>{text}</p>"


def note(text):
    """Text that explains what is beside it, as HTML."""
    return f"<p class='note'>{text}</p>"


def page(results, sections, title, lead, palette):
    """The page, whose links lead to the first section of each topic."""
    first = {}
    for section in sections:
        first.setdefault(section.topic, section.name)
    links = "".join(f"<a href='#{name}'>{escape(topic)}</a>" for topic, name in first.items())
    content = "\n".join(section.html for section in sections)
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
<nav>{links}</nav>
</header>
<main>
{content}
</main>
<footer><p>Made by lazuli-bench report from {plural(results, 'result')}. Medians unless said otherwise.</p></footer>
</body>
</html>
"""
