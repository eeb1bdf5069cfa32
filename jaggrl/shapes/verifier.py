"""Read a picture by rules and say which parts of its caption hold: ground truth that cannot be hacked.

Backgrounds have no hue and objects have one, so an object is a connected region whose pixels have chroma.
Its colour is the nearest hue, its shape the ideal figure of equal area and centroid that overlaps it best.
Dimming keeps hue, blur keeps half-height contours, and a light smoothing removes grain, so the reading does
not depend on quality.
"""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage

from jaggrl.shapes.render import Image, coverage
from jaggrl.shapes.scene import COLOURS, SHAPES, SIZE, SQUARE_SCALE, TRIANGLE_SCALE, Spec, Thing, related

SMOOTHING = 0.7
"""Standard deviation in pixels of the smoothing before anything is read."""
LEAST_CHROMA = 0.12
"""Least max(RGB) - min(RGB) of an object's pixels: the weakest colour, dimmed by half, has twice as much."""
LEAST_AREA = 50
"""Least area of an object in pixels, half of the smallest object's; smaller regions are specks."""
LEAST_OVERLAP = 0.80
"""Least intersection over union with an ideal figure: a circle's with a square of equal area is 0.83."""
LEAST_OFFSET = 4.0
"""Least distance in pixels along the named direction for a relation to hold."""
WHITE_FROM, BLACK_UNTIL = 0.54, 0.20
"""Brightness limits of backgrounds: white dimmed to 0.6 is 0.58, gray is at most 0.47 and dimmed 0.28."""


@dataclass(frozen=True)
class Found:
    """One object read from a picture; `shape` None: like none of the shapes. Lengths in pixels."""

    shape: str | None
    colour: str
    x: float
    y: float
    area: float


@dataclass(frozen=True)
class Reading:
    """What the verifier sees in a picture."""

    objects: tuple[Found, ...]
    background: str | None


@dataclass(frozen=True)
class Verdict:
    """Which parts of a caption hold, by names such as `background`, `count`, `colour 2`, `position`."""

    parts: dict[str, bool]

    @property
    def all_hold(self) -> bool:
        """Whether every part holds."""
        return all(self.parts.values())

    @property
    def fraction(self) -> float:
        """Share of the parts that hold, in [0, 1]: a dense score."""
        return sum(self.parts.values()) / len(self.parts)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Names of the parts that do not hold."""
        return tuple(name for name, holds in self.parts.items() if not holds)


def as_image(picture: ArrayLike) -> Image:
    """A picture as [64, 64, 3] float32 in [0, 1]; uint8 is scaled. Raises ValueError on other input."""
    image = np.asarray(picture)
    if image.shape != (SIZE, SIZE, 3):
        raise ValueError(f"picture has shape {image.shape}; give [{SIZE}, {SIZE}, 3], RGB last")
    image = image.astype(np.float32) / 255.0 if image.dtype == np.uint8 else image.astype(np.float32)
    if not np.isfinite(image).all() or image.min() < -0.01 or image.max() > 1.01:
        raise ValueError("picture has values outside [0, 1]; clamp it or give uint8")
    return image


def verify(picture: ArrayLike, spec: Spec) -> Verdict:
    """Compare a picture ([64, 64, 3], floats in [0, 1] or uint8) with a spec.

    The found objects are matched to the demanded ones so that most parts hold; a demanded object without a
    match lacks its shape and colour. Any surplus or missing object breaks `count`.
    """
    reading = read(picture)
    parts = {
        "background": reading.background == spec.background,
        "count": len(reading.objects) == len(spec.things),
    }
    matched = _match(reading.objects, spec)
    for number, (thing, found) in enumerate(zip(spec.things, matched, strict=True), start=1):
        parts[f"shape {number}"] = found is not None and found.shape == thing.shape
        if thing.colour is not None:
            parts[f"colour {number}"] = found is not None and found.colour == thing.colour
    if spec.relation is not None:
        parts["position"] = _position_holds(spec.relation, matched)
    return Verdict(parts)


def read(picture: ArrayLike) -> Reading:
    """Find the objects of a picture, largest first, and its background."""
    image = as_image(picture)
    image = ndimage.gaussian_filter(image, (SMOOTHING, SMOOTHING, 0), mode="nearest")
    chroma = image.max(axis=2) - image.min(axis=2)
    names = _nearest_hue(image)
    objects: list[Found] = []
    taken = np.zeros((SIZE, SIZE), bool)
    for index, colour in enumerate(COLOURS):
        for region in _regions((names == index) & (chroma > LEAST_CHROMA)):
            # The edge of a blurred object lies where half of its own colour is left.
            half = 0.5 * np.quantile(chroma[region], 0.8)
            for mask in _regions(region & (chroma > half)):
                taken |= mask
                objects.append(_describe(mask, colour))
    objects.sort(key=lambda found: -found.area)
    return Reading(tuple(objects), _background(image, chroma, taken))


def _regions(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """The connected regions of a mask that are no specks, each as a mask [SIZE, SIZE]."""
    labels, _ = ndimage.label(mask)
    areas = np.bincount(labels.ravel())
    return [labels == label for label in range(1, len(areas)) if areas[label] >= LEAST_AREA]


def _nearest_hue(image: Image) -> NDArray[np.int64]:
    """Index of the colour whose hue direction is nearest to each pixel's, [SIZE, SIZE]."""
    flat = image - image.min(axis=2, keepdims=True)
    return np.asarray(
        np.argmax(flat @ _directions().T / (1e-6 + np.linalg.norm(flat, axis=2, keepdims=True)), axis=2)
    )


@cache
def _directions() -> NDArray[np.float32]:
    """Unit vectors of the colours without their gray part, [C, 3]."""
    table = np.asarray(list(COLOURS.values()), np.float32)
    table -= table.min(axis=1, keepdims=True)
    return np.asarray(table / np.linalg.norm(table, axis=1, keepdims=True))


def _describe(mask: NDArray[np.bool_], colour: str) -> Found:
    area = float(mask.sum())
    rows, columns = np.nonzero(mask)
    x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    overlaps = {shape: _overlap(mask, _ideal(shape, x, y, area)) for shape in SHAPES}
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return Found(best if overlaps[best] >= LEAST_OVERLAP else None, colour, x, y, area)


def _ideal(shape: str, x: float, y: float, area: float) -> NDArray[np.float32]:
    """Coverage of the shape that has this centroid and area."""
    unit = {
        "circle": np.pi,
        "square": 4.0 * SQUARE_SCALE**2,
        "triangle": 0.75 * np.sqrt(3.0) * TRIANGLE_SCALE**2,
    }
    return coverage(shape, x, y, float(np.sqrt(area / unit[shape])))


def _overlap(mask: NDArray[np.bool_], ideal: NDArray[np.float32]) -> float:
    shared = float(ideal[mask].sum())
    return shared / (float(mask.sum()) + float(ideal.sum()) - shared)


def _background(image: Image, chroma: NDArray[np.float32], taken: NDArray[np.bool_]) -> str | None:
    """Name of the background, from the pixels away from all objects; None if most of them have a hue."""
    away = ~ndimage.binary_dilation(taken, iterations=3)
    if away.mean() < 0.1 or np.median(chroma[away]) > LEAST_CHROMA:
        return None
    brightness = float(np.median(image.mean(axis=2)[away]))
    return "white" if brightness > WHITE_FROM else "black" if brightness < BLACK_UNTIL else "gray"


def _match(objects: tuple[Found, ...], spec: Spec) -> tuple[Found | None, ...]:
    """The demanded objects' counterparts, in the spec's order, so that most parts hold."""
    wanted = len(spec.things)
    # Beyond six candidates only the largest matter: a picture that full has lost its count anyway.
    candidates: list[Found | None] = [*objects[:6], *([None] * max(0, wanted - len(objects)))]
    best: tuple[Found | None, ...] = tuple(candidates[:wanted])
    best_score = -1.0
    for choice in permutations(candidates, wanted):
        score = sum(_agreement(found, thing) for found, thing in zip(choice, spec.things, strict=True))
        if spec.relation is not None and _position_holds(spec.relation, choice):
            score += 0.5
        if score > best_score:
            best, best_score = choice, score
    return best


def _agreement(found: Found | None, thing: Thing) -> float:
    if found is None:
        return 0.0
    return float(found.shape == thing.shape) + float(
        thing.colour is not None and found.colour == thing.colour
    )


def _position_holds(relation: str, pair: tuple[Found | None, ...]) -> bool:
    first, second = pair[0], pair[1]
    if first is None or second is None:
        return False
    return related(relation, second.x - first.x, second.y - first.y, LEAST_OFFSET)
