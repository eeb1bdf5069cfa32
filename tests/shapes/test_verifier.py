"""The verifier agrees with clean and degraded renderings, and names exactly a picture's mistake."""

from dataclasses import replace

import numpy as np
import pytest

from jaggrl.shapes.captions import parse, specs
from jaggrl.shapes.render import DEGRADATIONS, degrade, render
from jaggrl.shapes.scene import (
    BACKGROUNDS,
    CATEGORIES,
    COLOURS,
    INVERSE,
    SHAPES,
    Object,
    Scene,
    Spec,
    Thing,
    sample_scene,
)
from jaggrl.shapes.verifier import read, verify

MISTAKES = ("background", "count", "shape", "colour", "position")


def agreement(category: str, count: int, kind: str | None = None) -> float:
    """Share of `count` random renderings of a category on which every part holds."""
    rng = np.random.default_rng(CATEGORIES.index(category))
    found, hits = list(specs(category)), 0
    for _ in range(count):
        spec = found[rng.integers(len(found))]
        image = render(sample_scene(spec, rng))
        if kind is not None:
            image = degrade(image, kind, float(rng.uniform()), rng)
        hits += verify(image, spec).all_hold
    return hits / count


def other(value: str, names: object, rng: np.random.Generator) -> str:
    """Another of some names."""
    left = [name for name in names if name != value]  # type: ignore[attr-defined]
    return left[rng.integers(len(left))]


def with_mistake(spec: Spec, mistake: str, rng: np.random.Generator) -> tuple[Spec, str] | None:
    """What a picture with one mistake shows, and the broken part; None where the caption lacks it."""
    things, number = list(spec.things), int(rng.integers(len(spec.things)))
    thing = things[number]
    if mistake == "background":
        return replace(spec, background=other(spec.background, BACKGROUNDS, rng)), "background"
    if mistake == "position":
        return (replace(spec, relation=INVERSE[spec.relation]), "position") if spec.relation else None
    if mistake == "count":
        wrong = int(other(str(len(things)), "1234", rng))
        if spec.category == "counting":
            return replace(spec, things=(thing,) * wrong), "count"
        return replace(spec, things=(*things, Thing(SHAPES[rng.integers(3)]))), "count"
    if mistake == "colour" and thing.colour is None:
        return None
    changed = (
        replace(thing, shape=other(thing.shape, SHAPES, rng))
        if mistake == "shape"
        else replace(thing, colour=other(str(thing.colour), COLOURS, rng))
    )
    if spec.category == "position" and mistake == "shape":
        return None  # two equal shapes may also stand the wrong way round: not one known mistake
    things[number] = changed
    return replace(spec, things=tuple(things)), mistake


def naming(mistake: str, count: int) -> float:
    """Share of pictures with one known mistake whose verdict names it."""
    rng = np.random.default_rng(MISTAKES.index(mistake))
    found = [spec for category in CATEGORIES for spec in specs(category)]
    by_category = {c: [s for s in found if s.category == c] for c in CATEGORIES}
    done = hits = 0
    while done < count:
        pool = by_category[CATEGORIES[rng.integers(len(CATEGORIES))]]
        spec = pool[rng.integers(len(pool))]
        made = with_mistake(spec, mistake, rng)
        if made is None:
            continue
        shown, part = made
        named = {name.split()[0] for name in verify(render(sample_scene(shown, rng)), spec).mistakes}
        # A missing object lacks its shape and colour too; otherwise nothing but the mistake may be named.
        missing = part == "count" and len(shown.things) < len(spec.things)
        hits += part in named if missing else named == {part}
        done += 1
    return hits / count


@pytest.mark.parametrize("category", CATEGORIES)
def test_agrees_with_clean_renderings(category):
    assert agreement(category, 60) >= 0.99


@pytest.mark.parametrize("kind", DEGRADATIONS)
def test_tolerates_degradations(kind):
    assert np.mean([agreement(category, 20, kind) for category in CATEGORIES]) >= 0.97


@pytest.mark.parametrize("mistake", MISTAKES)
def test_names_the_one_mistake(mistake):
    assert naming(mistake, 100) >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("category", CATEGORIES)
def test_agrees_with_2000_clean_renderings(category):
    assert agreement(category, 2000) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_names_the_one_mistake_on_2000(mistake):
    assert naming(mistake, 2000) >= 0.98


def test_verdict_counts_the_parts():
    scene = Scene(
        (Object("circle", "red", 20.0, 20.0, 11.0), Object("square", "blue", 45.0, 40.0, 11.0)), "white"
    )
    verdict = verify(render(scene), parse("a red circle and a green square on a white background"))
    assert verdict.mistakes == ("colour 2",)
    assert verdict.fraction == pytest.approx(5 / 6) and not verdict.all_hold
    swapped = verify(render(scene), parse("a blue square and a red circle on a white background"))
    assert swapped.all_hold and swapped.fraction == 1.0


def test_reads_place_and_area():
    reading = read(render(Scene((Object("triangle", "green", 30.0, 35.0, 12.0),), "black")))
    (found,) = reading.objects
    assert (found.shape, found.colour, reading.background) == ("triangle", "green", "black")
    assert found.x == pytest.approx(30.0, abs=0.5) and found.y == pytest.approx(35.0, abs=0.5)


def test_an_empty_or_senseless_picture_breaks_parts_without_an_error():
    spec = parse("a circle left of a square on a white background")
    blank = verify(np.full((64, 64, 3), 0.97), spec)
    assert blank.mistakes == ("count", "shape 1", "shape 2", "position")
    assert not verify(np.random.default_rng(0).random((64, 64, 3)), spec).all_hold
    assert verify(np.full((64, 64, 3), (255, 0, 0), np.uint8), spec).parts["background"] is False


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (np.zeros((3, 64, 64)), "shape"),
        (np.full((64, 64, 3), 2.0), "outside"),
        (np.full((64, 64, 3), np.nan), "outside"),
    ],
)
def test_bad_pictures_are_refused(picture, message):
    with pytest.raises(ValueError, match=message):
        verify(picture, parse("a circle on a white background"))
