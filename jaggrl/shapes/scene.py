"""The shapes world's vocabulary: what a picture can show (`Scene`) and what a caption demands (`Spec`)."""

from dataclasses import dataclass

import numpy as np

SIZE = 64
"""Side of every picture in pixels."""

SHAPES = ("circle", "square", "triangle")

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.14),
    "orange": (0.97, 0.52, 0.06),
    "yellow": (0.96, 0.90, 0.12),
    "green": (0.13, 0.66, 0.22),
    "blue": (0.13, 0.33, 0.88),
    "purple": (0.58, 0.16, 0.74),
}
"""Object colours, RGB in [0, 1]. Hues are far apart, so that a dimmed or blurred colour keeps its name."""

BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "white": (0.97, 0.97, 0.97),
    "gray": (0.47, 0.47, 0.47),
    "black": (0.05, 0.05, 0.05),
}
"""Background colours, RGB in [0, 1]. All are without hue: an object is whatever has one."""

RELATIONS = ("left of", "right of", "above", "below")
INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
CATEGORIES = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""GenEval's six categories, by GenEval's names."""

MAX_OBJECTS = 4
MARGIN = 2.0
"""Least distance in pixels between an object and the picture's edge."""
GAP = 4.0
"""Least distance in pixels between the bounding boxes of two objects."""
RADII = {1: (10.0, 13.0), 2: (9.0, 13.0), 3: (8.5, 11.0), 4: (8.0, 10.0)}
"""Range of object radii in pixels by the number of objects in the scene."""

SQUARE_SCALE = 0.9
"""Half the side of a square over its radius."""
TRIANGLE_SCALE = 1.3
"""Circumradius of the upright equilateral triangle over its radius."""


@dataclass(frozen=True)
class Thing:
    """One object as a caption demands it; `colour` None: any colour will do."""

    shape: str
    colour: str | None = None


@dataclass(frozen=True)
class Spec:
    """What a caption demands: exactly these objects, on this background.

    `relation` (position captions only) holds between `things[0]` and `things[1]`, in picture coordinates.
    """

    category: str
    things: tuple[Thing, ...]
    background: str
    relation: str | None = None


@dataclass(frozen=True)
class Object:
    """One drawn object; `x` (right), `y` (down) and `radius` in pixels. (x, y) is the shape's centroid."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float

    def box(self) -> tuple[float, float, float, float]:
        """Bounding box (left, top, right, bottom) in pixels."""
        if self.shape == "triangle":
            big = TRIANGLE_SCALE * self.radius
            half = big * np.sqrt(3.0) / 2.0
            return self.x - half, self.y - big, self.x + half, self.y + big / 2.0
        half = self.radius * (SQUARE_SCALE if self.shape == "square" else 1.0)
        return self.x - half, self.y - half, self.x + half, self.y + half


@dataclass(frozen=True)
class Scene:
    """What a picture shows: objects on a background."""

    objects: tuple[Object, ...]
    background: str


def related(relation: str, dx: float, dy: float, least: float) -> bool:
    """Whether `relation` holds for the offset (dx, dy) = second minus first, by at least `least` pixels."""
    if relation in ("left of", "right of"):
        return (dx if relation == "left of" else -dx) >= least
    return (dy if relation == "above" else -dy) >= least


def sample_scene(spec: Spec, rng: np.random.Generator) -> Scene:
    """Draw a scene that fulfils `spec`: free colours are uniform, places are uniform without overlap.

    Raises ValueError if no room is found in 10,000 tries (cannot happen for specs of the grammar).
    """
    count = len(spec.things)
    low, high = RADII[count]
    names = list(COLOURS)
    colours = [thing.colour or names[rng.integers(len(names))] for thing in spec.things]
    for _ in range(10_000):
        objects: list[Object] = []
        for thing, colour in zip(spec.things, colours, strict=True):
            placed = _place(thing.shape, colour, rng.uniform(low, high), rng)
            if any(_too_near(placed, other) for other in objects):
                break
            objects.append(placed)
        if len(objects) == count and _arranged(spec, objects):
            return Scene(tuple(objects), spec.background)
    raise ValueError(f"no room for {count} objects in a picture of {SIZE} pixels; use at most {MAX_OBJECTS}")


def _place(shape: str, colour: str, radius: float, rng: np.random.Generator) -> Object:
    left, top, right, bottom = Object(shape, colour, 0.0, 0.0, radius).box()
    x = rng.uniform(MARGIN - left, SIZE - MARGIN - right)
    y = rng.uniform(MARGIN - top, SIZE - MARGIN - bottom)
    return Object(shape, colour, float(x), float(y), float(radius))


def _too_near(a: Object, b: Object) -> bool:
    a_box, b_box = a.box(), b.box()
    apart_x = max(a_box[0], b_box[0]) - min(a_box[2], b_box[2])
    apart_y = max(a_box[1], b_box[1]) - min(a_box[3], b_box[3])
    return max(apart_x, apart_y) < GAP


def _arranged(spec: Spec, objects: list[Object]) -> bool:
    if spec.relation is None:
        return True
    dx, dy = objects[1].x - objects[0].x, objects[1].y - objects[0].y
    along, across = (dx, dy) if spec.relation in ("left of", "right of") else (dy, dx)
    # The named direction must clearly dominate, or the caption would be true but odd.
    return related(spec.relation, dx, dy, least=16.0) and abs(across) <= 0.75 * abs(along)
