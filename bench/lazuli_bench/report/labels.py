"""Places the labels of curves beside them, without overlap."""

from .svg import width_of

CELL = 5

# How far from a curve a name may be, to its side, and up or down when it is not next to it.
GAPS = (6, 16, 30, 50, 75, 105, 140, 180)
SHIFTS = (0, 9, -9, 20, -20, 36, -36)


def steps_between(x1, y1, x2, y2, least):
    """Into how many steps of a few pixels a line is divided."""
    return max(least, int(max(abs(x2 - x1), abs(y2 - y1)) / 3))


class Room:
    """Which cells of a plot curves and labels occupy."""

    def __init__(self, left, top, right, bottom):
        self.box, self.cells, self.labels = (left, top, right, bottom), {}, []

    def occupy(self, name, points):
        """A curve is here."""
        for (x1, y1), (x2, y2) in zip(points, points[1:]):
            steps = steps_between(x1, y1, x2, y2, 1)
            for index in range(steps + 1):
                share = index / steps
                cell = (int((x1 + (x2 - x1) * share) // CELL), int((y1 + (y2 - y1) * share) // CELL))
                self.cells.setdefault(cell, set()).add(name)

    def covered(self, left, top, right, bottom):
        """How much of curves a label covers; None where it cannot be."""
        x0, y0, x1, y1 = self.box
        if left < x0 or right > x1 or top < y0 or bottom > y1:
            return None
        if any(left < r + 4 and right > l - 4 and top < b + 1 and bottom > t - 1
               for l, t, r, b in self.labels):
            return None
        return sum(len(self.cells.get((column, row), ()))
                   for column in range(int(left // CELL), int(right // CELL) + 1)
                   for row in range(int(top // CELL), int(bottom // CELL) + 1))

    def crossed(self, name, x1, y1, x2, y2):
        """How many other curves, and how much of labels, a line from a curve crosses."""
        steps = steps_between(x1, y1, x2, y2, 2)
        curves, labels = set(), 0
        for index in range(1, steps + 1):
            x, y = x1 + (x2 - x1) * index / steps, y1 + (y2 - y1) * index / steps
            curves |= self.cells.get((int(x // CELL), int(y // CELL)), set())
            labels += any(l <= x <= r and t <= y <= b for l, t, r, b in self.labels)
        return len(curves - {name}), labels


def places(points):
    """Where a label may be, as anchor on the curve, side, and distance: (x, y), 1 or -1, gap,
    shift."""
    anchors = [((x1 + x2) / 2, (y1 + y2) / 2) for (x1, y1), (x2, y2) in zip(points, points[1:]) if abs(y2 - y1) > 0.5]
    for anchor in anchors[::max(1, len(anchors) // 22)] or points[:1]:
        for side in (1, -1):
            for gap in GAPS:
                for shift in SHIFTS if gap >= 16 else SHIFTS[:1]:
                    yield anchor, side, gap, shift


def place(room, name, points, content, size):
    """Take the label's best place near its curve: cost, x and y of the text, side, anchor. None:
    there is no room."""
    wide, high = width_of(content, size, True), size * 1.15
    best, box = None, None
    for (x, y), side, gap, shift in places(points):
        distance = gap * 0.35 + abs(shift) * 0.3
        if best and distance >= best[0]:
            continue
        near = x + side * gap
        left, top = near if side > 0 else near - wide, y + shift - high / 2
        covered = room.covered(left - 2, top, left + wide + 2, top + high)
        if covered is None:
            continue
        curves, labels = room.crossed(name, x, y, near - side * 3, y + shift)
        cost = covered * 16 + curves * 26 + labels * 200 + distance
        if best is None or cost < best[0]:
            best, box = (cost, near, y + shift, side, (x, y)), (left, top, left + wide, top + high)
    if best:
        room.labels.append(box)
    return best


def place_all(room, named, size):
    """Places of the labels of [(name, label, points)], by name. Which one is placed first matters,
    so several orders are tried."""
    def cost(found):
        return sum(spot[0] if spot else 1000 for spot in found.values())

    tried = []
    for order in (sorted(named, key=lambda entry: -len(entry[1])), sorted(named, key=lambda entry: entry[2][0]),
                  sorted(named, key=lambda entry: entry[2][0], reverse=True), named):
        room.labels = []
        tried.append({name: place(room, name, points, label, size) for name, label, points in order})
    return {name: spot for name, spot in min(tried, key=cost).items() if spot}


def spread(heights, apart, low, high):
    """Moves sorted heights so far that they are `apart`."""
    heights = list(heights)
    for _ in range(200):
        moved = False
        for index in range(len(heights) - 1):
            missing = apart - (heights[index + 1] - heights[index])
            if missing > 0.01:
                heights[index] -= missing / 2
                heights[index + 1] += missing / 2
                moved = True
        heights = [min(max(height, low - 10), high + 10) for height in heights]
        if not moved:
            break
    return heights
