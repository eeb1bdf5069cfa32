"""Drawing: exact areas, placement within bounds, degradations that keep what is shown."""

import numpy as np
import pytest

from jaggrl.shapes.captions import specs
from jaggrl.shapes.render import DEGRADATIONS, coverage, degrade, draw, render
from jaggrl.shapes.scene import (
    BACKGROUNDS,
    CATEGORIES,
    COLOURS,
    GAP,
    MARGIN,
    SIZE,
    SQUARE_SCALE,
    TRIANGLE_SCALE,
    Object,
    Scene,
    sample_scene,
)

AREAS = {"circle": np.pi, "square": 4 * SQUARE_SCALE**2, "triangle": 0.75 * np.sqrt(3) * TRIANGLE_SCALE**2}


@pytest.mark.parametrize("shape", AREAS)
def test_coverage_has_the_shapes_area_and_centroid(shape):
    alpha = coverage(shape, 30.3, 33.8, 10.0)
    assert alpha.sum() == pytest.approx(100 * AREAS[shape], rel=0.02)
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] + 0.5
    assert (alpha * columns).sum() / alpha.sum() == pytest.approx(30.3, abs=0.1)
    assert (alpha * rows).sum() / alpha.sum() == pytest.approx(33.8, abs=0.1)


def test_a_picture_has_the_named_colours():
    image = render(Scene((Object("square", "blue", 32.0, 32.0, 10.0),), "gray"))
    assert image.shape == (SIZE, SIZE, 3) and image.dtype == np.float32
    np.testing.assert_allclose(image[32, 32], COLOURS["blue"], atol=1e-6)
    np.testing.assert_allclose(image[2, 2], BACKGROUNDS["gray"], atol=1e-6)


def test_sampled_objects_stay_inside_and_apart():
    rng = np.random.default_rng(0)
    for category in CATEGORIES:
        found = list(specs(category))
        for number in rng.integers(len(found), size=30):
            scene = sample_scene(found[number], rng)
            boxes = [item.box() for item in scene.objects]
            assert all(min(box) >= MARGIN - 1e-6 and max(box) <= SIZE - MARGIN + 1e-6 for box in boxes)
            for i, a in enumerate(boxes):
                for b in boxes[:i]:
                    apart = max(max(a[k], b[k]) - min(a[k + 2], b[k + 2]) for k in (0, 1))
                    assert apart >= GAP - 1e-6


def test_sampling_is_a_function_of_the_generator():
    spec = next(specs("color_attr"))
    first, second = (
        draw(sample_scene(spec, rng), "degraded", rng) for rng in map(np.random.default_rng, (5, 5))
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", DEGRADATIONS)
def test_degradation_grows_with_strength_and_stays_in_range(kind):
    image = render(Scene((Object("circle", "red", 30.0, 30.0, 12.0),), "white"))
    change = []
    for strength in (0.0, 1.0):
        worse = degrade(image, kind, strength, np.random.default_rng(0))
        assert worse.min() >= 0.0 and worse.max() <= 1.0 and worse.dtype == np.float32
        change.append(np.abs(worse - image).mean())
    assert 0.0 < change[0] < change[1]


def test_unknown_names_are_refused():
    scene = Scene((), "white")
    with pytest.raises(ValueError, match="unknown quality 'good'; use clean or degraded"):
        draw(scene, "good", np.random.default_rng(0))
    with pytest.raises(ValueError, match="unknown degradation 'fog'; use one of blur"):
        degrade(render(scene), "fog", 1.0, np.random.default_rng(0))
    with pytest.raises(ValueError, match="unknown shape 'star'"):
        coverage("star", 0.0, 0.0, 1.0)
