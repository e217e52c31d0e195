"""The lines of docs/kubernetes.md that a reader types."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]
PAGE = REPOSITORY / "docs/kubernetes.md"

# What stands for something of the reader's own.
OURS = {
    "registry.example/": "127.0.0.1:5000/",
    "-f dist/kubernetes/daemonset.yaml": "-f /test/dist/kubernetes/daemonset.yaml",
    "NODE": "node1",
}


class Docs:
    """Lines with `kubectl`, and which of them were typed."""

    def __init__(self):
        self.lines = set(lines(PAGE.read_text()))
        self.typed = set()

    def line(self, text):
        """The command of a line in the document, as it is typed here."""
        if text not in self.lines:
            raise ValueError(f"docs/kubernetes.md does not have the line `{text}`")
        self.typed.add(text)
        for theirs, ours in OURS.items():
            text = text.replace(theirs, ours)
        return text

    def untyped(self):
        """Lines that nothing has typed."""
        return sorted(self.lines - self.typed)


def lines(text):
    """Commands in indented blocks, and in `code` of paragraphs."""
    paragraphs = []
    for block in text.split("\n\n"):
        indented = [line.strip() for line in block.splitlines() if line.startswith("    ")]
        for line in indented:
            if line.startswith("kubectl "):
                yield re.sub(r"\s+#.*", "", line)
        paragraphs.append(" ".join(line for line in block.splitlines() if not line.startswith("    kubectl ")))
    for code in re.findall(r"`(kubectl [^`]+)`", re.sub(r"\s+", " ", " ".join(paragraphs))):
        yield code
