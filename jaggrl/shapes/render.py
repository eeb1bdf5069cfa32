"""Draw scenes: 64x64 RGB pictures with analytic anti-aliasing, clean or degraded.

A degraded picture (blurred, dim, grainy, or a mixture) shows the same scene; captions never mention
quality, so a model trained on both has something that a preference reward can move without breaking the
caption.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from jaggrl.shapes.scene import BACKGROUNDS, COLOURS, SIZE, SQUARE_SCALE, TRIANGLE_SCALE, Object, Scene

Image = NDArray[np.float32]
"""A picture, [SIZE, SIZE, 3], RGB in [0, 1]."""

QUALITIES = ("clean", "degraded")
DEGRADATIONS = ("blur", "dim", "noise", "mixture")
_Y, _X = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32) + 0.5


def coverage(shape: str, x: float, y: float, radius: float) -> NDArray[np.float32]:
    """How much of each pixel a shape covers, [SIZE, SIZE] in [0, 1].

    One minus the signed distance to the edge, clipped to one pixel's width: exact for straight edges
    parallel to the pixels, within 2 % of supersampling elsewhere. Raises ValueError on an unknown shape.
    """
    dx, dy = _X - x, _Y - y
    if shape == "circle":
        distance = np.hypot(dx, dy) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(dx), np.abs(dy)) - SQUARE_SCALE * radius
    elif shape == "triangle":
        inner = TRIANGLE_SCALE * radius / 2.0
        slope = np.sqrt(3.0) / 2.0 * np.abs(dx) - dy / 2.0
        distance = np.maximum(dy, slope) - inner
    else:
        raise ValueError(f"unknown shape {shape!r}; use circle, square or triangle")
    return np.clip(0.5 - distance, 0.0, 1.0).astype(np.float32)


def render(scene: Scene) -> Image:
    """The clean picture of a scene."""
    image = np.empty((SIZE, SIZE, 3), np.float32)
    image[:] = BACKGROUNDS[scene.background]
    for item in scene.objects:
        _paint(image, item)
    return image


def degrade(image: Image, kind: str, strength: float, rng: np.random.Generator) -> Image:
    """A worse copy of a picture; `strength` in [0, 1] runs from visible to strong.

    blur: Gaussian of 0.8 to 2.2 pixels. dim: times 0.85 to 0.6. noise: colour grain of 2 pixels, standard
    deviation 0.03 to 0.08. mixture: all three, each weaker. Raises ValueError on an unknown kind.
    """
    if kind not in DEGRADATIONS:
        raise ValueError(f"unknown degradation {kind!r}; use one of {', '.join(DEGRADATIONS)}")
    weight = 0.6 if kind == "mixture" else 1.0
    if kind in ("blur", "mixture"):
        image = ndimage.gaussian_filter(image, (*(weight * (0.8 + 1.4 * strength),) * 2, 0), mode="nearest")
    if kind in ("dim", "mixture"):
        image = image * np.float32(1.0 - weight * (0.15 + 0.25 * strength))
    if kind in ("noise", "mixture"):
        grain = rng.standard_normal((SIZE // 2, SIZE // 2, 3), np.float32).repeat(2, 0).repeat(2, 1)
        image = image + np.float32(weight * (0.03 + 0.05 * strength)) * grain
    return np.clip(image, 0.0, 1.0).astype(np.float32)


def draw(scene: Scene, quality: str, rng: np.random.Generator) -> Image:
    """The picture of a scene at a quality; a degraded one gets a random kind and strength.

    Raises ValueError on an unknown quality.
    """
    if quality not in QUALITIES:
        raise ValueError(f"unknown quality {quality!r}; use clean or degraded")
    image = render(scene)
    if quality == "clean":
        return image
    kind = DEGRADATIONS[rng.choice(len(DEGRADATIONS), p=(0.35, 0.25, 0.15, 0.25))]
    return degrade(image, kind, float(rng.uniform()), rng)


def _paint(image: Image, item: Object) -> None:
    alpha = coverage(item.shape, item.x, item.y, item.radius)[..., None]
    image += alpha * (np.asarray(COLOURS[item.colour], np.float32) - image)
