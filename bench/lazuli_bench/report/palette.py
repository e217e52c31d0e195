"""Colours of contenders and other curves, the same in every figure."""

from typing import NamedTuple

BASELINE = "overlayfs"

# These pull whole images, so they don't count for the fewest bytes that a start must fetch.
PULLED_WHOLE = {"overlayfs", "overlayfs-mirror", "erofs"}

# Colours of a figure's parts, on light and on dark backgrounds.
GROUND = {"bg": ("#ffffff", "#0d1117"), "ink": ("#1c2330", "#e3e8ef"),
          "soft": ("#5a6472", "#9aa5b3"), "grid": ("#e3e6eb", "#262d37"),
          "axis": ("#a9b0ba", "#55606e")}

# On a light and on a dark ground, and dashes. Blues are Lazuli's, greys belong to systems that pull
# whole images, warm tones to the other lazy ones. Neighbours differ in lightness and in dashes too.
LAZULI = [("#1d3fb8", "#7fa2ff", ""), ("#4580dd", "#5585ea", "6 3"), ("#0b1f5e", "#c2d2ff", "2 3"),
          ("#3f6f9f", "#7fb0d6", "9 3 2 3")]
WHOLE = [("#565e6b", "#8e98a6", ""), ("#857f73", "#c2bdae", "7 3"), ("#4a4d52", "#a3a7ae", "3 3")]
LAZY = [("#a96a1c", "#dba14e", ""), ("#8d3f30", "#d0776a", "8 3"), ("#a58b78", "#c9b09c", "3 3"),
        ("#7a5a6e", "#b791a9", "8 3 2 3"), ("#8a7a1f", "#c4b24f", "5 2")]


def own(name):
    """Whether this is Lazuli."""
    return name.startswith("lazuli")


def colours_for(name):
    """Those from which this contender's is taken."""
    return LAZULI if own(name) else WHOLE if name in PULLED_WHOLE else LAZY


class Colour(NamedTuple):
    """One thing's, whose classes are `s-KEY` for strokes and `f-KEY` for what is filled."""

    grounds: tuple
    dashes: str
    key: str


class Palette:
    """Colours by name."""

    def __init__(self, results):
        self.colours, self.used = {}, []
        for result in results:
            for contender in result.get("contenders", []):
                self.add(contender["name"], colours_for(contender["name"]))
        # Density is of the first one's, and of its two processes.
        for name, colours in [("lazuli", LAZULI), ("keeper", WHOLE), ("worker", LAZULI)]:
            self.add(name, colours)

    def add(self, name, colours):
        """Give a name the next one of these colours."""
        if name not in self.colours:
            light, dark, dashes = colours[self.used.count(colours) % len(colours)]
            self.colours[name] = Colour((light, dark), dashes, f"k{len(self.colours)}")
            self.used.append(colours)

    def key(self, name):
        """What a name's classes end with."""
        return self.colours[name].key

    def style(self):
        """The rules of all classes, dark ones in a media query; paper is white."""
        dashes = "".join(f".s-{colour.key}{{stroke-dasharray:{colour.dashes}}}"
                         for colour in self.colours.values() if colour.dashes)
        return (f"{self.rules(0)}{dashes}"
                ".label{font-weight:600}.halo{paint-order:stroke;stroke-width:4;"
                "stroke-linejoin:round;stroke-dasharray:none}.curve{fill:none;stroke-width:2;stroke-linejoin:round;"
                "stroke-linecap:butt}.own{stroke-width:2.8}.hit{fill-opacity:0}"
                ".hit:hover{fill-opacity:1}.lead{fill:none;stroke-width:1;stroke-dasharray:none;"
                "stroke-opacity:.7}.grid,.axis{stroke-width:1;fill:none}"
                f"@media screen and (prefers-color-scheme:dark){{{self.rules(1)}}}")

    def rules(self, dark):
        """The rules of colours, on a light ground (0) or on a dark one (1)."""
        ground = {name: pair[dark] for name, pair in GROUND.items()}
        lines = [f".t{{fill:{ground['ink']}}}.soft{{fill:{ground['soft']}}}",
                 f".halo{{stroke:{ground['bg']}}}.grid{{stroke:{ground['grid']}}}",
                 f".axis{{stroke:{ground['axis']}}}.ground{{fill:{ground['bg']}}}",
                 f".edge{{stroke:{ground['grid']}}}"]
        lines += [f".s-{colour.key}{{stroke:{colour.grounds[dark]}}}.f-{colour.key}{{fill:{colour.grounds[dark]}}}"
                  for colour in self.colours.values()]
        return "".join(lines)
