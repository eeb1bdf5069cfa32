"""The caption grammar, its inverse, and the split into train and unseen combinations."""

import pytest

from jaggrl.shapes.captions import (
    PER_CATEGORY,
    caption,
    captions,
    is_heldout,
    parse,
    prompt_list,
    read_prompts,
    specs,
    split_specs,
)
from jaggrl.shapes.scene import CATEGORIES, Spec, Thing


def test_parse_inverts_every_caption():
    for category in CATEGORIES:
        for spec in specs(category):
            assert spec.category == category
            for text in captions(spec):
                assert parse(text) == spec


def test_captions_read_as_english():
    red, orange = Thing("circle", "red"), Thing("square", "orange")
    assert caption(Spec("counting", (red, red), "white")) == "two red circles on a white background"
    pair = Spec("color_attr", (red, orange), "black")
    assert caption(pair, "a photo of") == "a photo of a red circle and an orange square on a black background"
    position = Spec("position", (Thing("circle"), Thing("square")), "gray", "left of")
    assert caption(position, article="one") == "one circle left of one square on a gray background"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a photo of a cat",
        "a red circle",
        "two circles on a white background",
        "a red circle left of a blue square on a white background",
        "a red circle and a square on a white background",
        "a circle and a circle on a white background",
        "a red circle and a red square on a white background",
        "a red circle on a white background.",
    ],
)
def test_text_outside_the_grammar_is_refused(text):
    with pytest.raises(ValueError, match="not a shapes caption"):
        parse(text)


def test_unknown_category_and_split_are_refused():
    with pytest.raises(ValueError, match="unknown category 'colours'; use one of single_object"):
        next(specs("colours"))
    with pytest.raises(ValueError, match="unknown split 'test'; use one of train, heldout"):
        split_specs("test")


def test_heldout_is_a_third_of_every_category_and_shares_no_meaning_with_train():
    train, heldout = split_specs("train"), split_specs("heldout")
    for category in CATEGORIES:
        total = len(train[category]) + len(heldout[category])
        assert 3 * len(heldout[category]) == total
        # Every background and relation occurs in both splits: the combinations are unseen, not the parts.
        for part in ("background", "relation"):
            seen = {getattr(spec, part) for spec in train[category]}
            assert seen == {getattr(spec, part) for spec in heldout[category]}
        assert {t for s in train[category] for t in s.things} >= {
            t for s in heldout[category] for t in s.things
        } or (category in ("single_object", "colors"))


def test_both_orders_of_a_pair_fall_into_one_split():
    circle, square = Thing("circle"), Thing("square")
    for background in ("white", "gray", "black"):
        sides = [
            Spec("position", (circle, square), background, "left of"),
            Spec("position", (square, circle), background, "right of"),
        ]
        assert is_heldout(sides[0]) == is_heldout(sides[1])
        pair = [Spec("two_object", things, background) for things in ((circle, square), (square, circle))]
        assert is_heldout(pair[0]) == is_heldout(pair[1])


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_shipped_prompt_files_are_the_generated_ones_and_balanced(split):
    prompts = read_prompts(split)
    assert prompts == prompt_list(split)
    assert len(set(prompts)) == len(prompts) == len(CATEGORIES) * PER_CATEGORY[split]
    for category in CATEGORIES:
        assert sum(parse(text).category == category for text in prompts) == PER_CATEGORY[split]
    assert all(is_heldout(parse(text)) == (split == "heldout") for text in prompts)


def test_at_least_240_heldout_prompts():
    assert len(read_prompts("heldout")) >= 240
