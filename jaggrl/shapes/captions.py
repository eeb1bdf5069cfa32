"""Captions in GenEval's six categories: generate, parse, and split into train and unseen combinations.

Grammar: `[prefix] body on a BACKGROUND background`; prefix is one of `PREFIXES`, body by category is

- single_object `a circle`, colors `a red circle`, counting `three red circles`,
- two_object `a circle and a square`, color_attr `a red circle and a blue square`,
- position `a circle left of a square`;

`one` may stand for `a`. Objects that a caption does not colour may have any colour.
"""

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

from jaggrl.shapes.scene import BACKGROUNDS, CATEGORIES, COLOURS, INVERSE, RELATIONS, SHAPES, Spec, Thing

PREFIXES = ("", "a photo of", "a picture of", "a drawing of", "an image of", "a sketch of", "a rendering of")
NUMBERS = {"two": 2, "three": 3, "four": 4}
PROMPTS = Path(__file__).parent / "prompts"
"""Folder of the written prompt files `train.txt` and `heldout.txt`, one caption a line."""
PER_CATEGORY = {"train": 80, "heldout": 42}
"""Captions per category in the written prompt files."""

_COLOUR = "|".join(COLOURS)
_SHAPE = "|".join(SHAPES)
_BODY = re.compile(
    rf"(?:(?P<number>{'|'.join(NUMBERS)}) (?P<colour_n>{_COLOUR}) (?P<shape_n>{_SHAPE})s"
    rf"|(?P<article>an?|one) (?:(?P<colour>{_COLOUR}) )?(?P<shape>{_SHAPE})"
    rf"(?: (?P<link>and|{'|'.join(RELATIONS)}) (?:an?|one) (?:(?P<colour_2>{_COLOUR}) )?"
    rf"(?P<shape_2>{_SHAPE}))?)"
    rf" on a (?P<background>{'|'.join(BACKGROUNDS)}) background"
)


def specs(category: str) -> Iterator[Spec]:
    """Every spec of a category, both orders of a pair included. Raises ValueError on an unknown category."""
    if category not in CATEGORIES:
        raise ValueError(f"unknown category {category!r}; use one of {', '.join(CATEGORIES)}")
    bodies: list[tuple[Thing, ...]]
    for background in BACKGROUNDS:
        if category == "single_object":
            bodies = [(Thing(shape),) for shape in SHAPES]
        elif category == "colors":
            bodies = [(Thing(shape, colour),) for shape in SHAPES for colour in COLOURS]
        elif category == "counting":
            kinds = [Thing(shape, colour) for shape in SHAPES for colour in COLOURS]
            bodies = [(kind,) * count for kind in kinds for count in NUMBERS.values()]
        elif category == "color_attr":
            kinds = [Thing(shape, colour) for shape in SHAPES for colour in COLOURS]
            bodies = [(a, b) for a, b in itertools.permutations(kinds, 2) if a.colour != b.colour]
        else:
            bodies = [(Thing(a), Thing(b)) for a, b in itertools.permutations(SHAPES, 2)]
        for relation in RELATIONS if category == "position" else (None,):
            for body in bodies:
                yield Spec(category, body, background, relation)


def caption(spec: Spec, prefix: str = "", article: str = "a") -> str:
    """The text of a spec; `article` is `a` (becomes `an` before a vowel) or `one`."""
    if spec.category == "counting":
        word = {count: name for name, count in NUMBERS.items()}[len(spec.things)]
        body = f"{word} {spec.things[0].colour} {spec.things[0].shape}s"
    else:
        body = f" {spec.relation or 'and'} ".join(_noun(thing, article) for thing in spec.things)
    return f"{prefix} {body} on a {spec.background} background".strip()


def captions(spec: Spec) -> list[str]:
    """Every text of a spec: all prefixes, both articles."""
    articles = ("a",) if spec.category == "counting" else ("a", "one")
    return [caption(spec, prefix, article) for prefix in PREFIXES for article in articles]


def parse(text: str) -> Spec:
    """The spec of a caption, the inverse of `caption`. Raises ValueError on text outside the grammar."""
    body = text
    for prefix in PREFIXES[1:]:
        body = body.removeprefix(f"{prefix} ")
    match = _BODY.fullmatch(body)
    if match is None:
        raise ValueError(
            f"not a shapes caption: {text!r}; write e.g. 'two red circles on a white background'"
        )
    part = match.groupdict()
    background = part["background"]
    if part["number"]:
        things = (Thing(part["shape_n"], part["colour_n"]),) * NUMBERS[part["number"]]
        return Spec("counting", things, background)
    first = Thing(part["shape"], part["colour"])
    if part["link"] is None:
        return Spec("colors" if first.colour else "single_object", (first,), background)
    second = Thing(part["shape_2"], part["colour_2"])
    relation = None if part["link"] == "and" else part["link"]
    _check_pair(text, first, second, relation)
    category = "position" if relation else "color_attr" if first.colour else "two_object"
    return Spec(category, (first, second), background, relation)


def is_heldout(spec: Spec) -> bool:
    """Whether this combination belongs to the held-out split: a third of each category, never trained on.

    The rule sums the indices of all parts modulo 3, so every colour, shape, count, relation and background
    occurs in both splits; it is the same for both orders of a pair, because both mean the same pictures.
    """
    colours, backgrounds = list(COLOURS), list(BACKGROUNDS)
    total = backgrounds.index(spec.background) + len(spec.things)
    if spec.category == "counting":
        # Repeated objects would count their indices `count` times, and drop out of the sum for three of them.
        things: tuple[Thing, ...] = spec.things[:1]
    else:
        things = spec.things
    for thing in things:
        total += SHAPES.index(thing.shape) + (colours.index(thing.colour) if thing.colour else 0)
    if spec.relation:
        direct = spec.relation if spec.relation in ("left of", "above") else INVERSE[spec.relation]
        total += RELATIONS.index(direct)
    return total % 3 == 1


def split_specs(split: str) -> dict[str, list[Spec]]:
    """All specs of a split (`train` or `heldout`) by category."""
    if split not in PER_CATEGORY:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(PER_CATEGORY)}")
    heldout = split == "heldout"
    return {name: [spec for spec in specs(name) if is_heldout(spec) == heldout] for name in CATEGORIES}


def prompt_list(split: str) -> list[str]:
    """The captions of a written prompt file: `PER_CATEGORY` distinct ones of each category, interleaved."""
    rng = random.Random(f"shapes-{split}")
    columns = []
    for found in split_specs(split).values():
        texts = [text for spec in found for text in captions(spec)]
        columns.append(rng.sample(texts, PER_CATEGORY[split]))
    return [text for row in zip(*columns, strict=True) for text in row]


def read_prompts(split: str) -> list[str]:
    """The shipped prompt file of a split."""
    return (PROMPTS / f"{split}.txt").read_text(encoding="utf-8").splitlines()


def _noun(thing: Thing, article: str) -> str:
    words = f"{thing.colour} {thing.shape}" if thing.colour else thing.shape
    return f"{'an' if article == 'a' and words[0] in 'aeiou' else article} {words}"


def _check_pair(text: str, first: Thing, second: Thing, relation: str | None) -> None:
    if relation and (first.colour or second.colour):
        raise ValueError(f"not a shapes caption: {text!r}; position captions name no colours")
    if (first.colour is None) != (second.colour is None):
        raise ValueError(f"not a shapes caption: {text!r}; colour both objects or neither")
    if first.colour is None and first.shape == second.shape:
        raise ValueError(f"not a shapes caption: {text!r}; two objects without colours need two shapes")
    if first.colour is not None and first.colour == second.colour:
        raise ValueError(f"not a shapes caption: {text!r}; the two colours must differ")
