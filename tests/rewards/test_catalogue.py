"""Configs of rewards: every mix on the command line, every mistake in one line, nothing loaded too early."""

from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import jaggrl
from jaggrl.errors import UserError
from jaggrl.rewards.base import Reward, WeightedReward, check_weights
from jaggrl.rewards.catalogue import build_rewards, missing_files
from tests.rewards.tiny import pictures, prompts_of

CONF = Path(jaggrl.__file__).parents[1] / "conf"
CHOICES = sorted(file.stem for file in (CONF / "reward").glob("*.yaml") if file.stem != "base")
SCORERS = sorted(file.stem for file in (CONF / "scorers").glob("*.yaml"))


def compose_reward(*overrides: str, scorers: str = "shapes") -> dict:
    """The ``reward`` node as plain data."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+scorers@model.scorers={scorers}", *overrides])
    return OmegaConf.to_container(config.reward, resolve=True)


@pytest.fixture
def scorers_here(hpsv2_files, clip_folder) -> list[str]:
    """Overrides that point the shapes scorers at the tiny random models."""
    return [
        f"model.scorers.hpsv2.checkpoint={hpsv2_files / 'checkpoint.pt'}",
        f"model.scorers.hpsv2.model={hpsv2_files / 'config.json'}",
        "model.scorers.hpsv2.bpe=null",
        f"model.scorers.clipscore.model={clip_folder}",
        f"model.scorers.pickscore.model={clip_folder}",
    ]


@pytest.mark.parametrize("scorers", SCORERS)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_with_every_set_of_scorers(choice, scorers):
    reward = compose_reward(f"+reward={choice}", scorers=scorers)
    mix = check_weights(reward["weights"], reward["catalogue"])
    assert set(mix) == set(choice.split("_")) if "verifier" not in choice else set(mix) == {choice}
    assert set(mix.values()) == {1.0}
    assert set(reward["weights"]) == set(reward["catalogue"]) and set(reward["eval"]) <= set(
        reward["catalogue"]
    )
    assert reward["mix"] == "reward"
    missing_files(reward["catalogue"], reward["catalogue"])  # every argument is one that its class takes


def test_any_mix_on_the_command_line():
    reward = compose_reward("+reward=hpsv2", "reward.weights={hpsv2: 1, pickscore: 0.5}")
    assert check_weights(reward["weights"], reward["catalogue"]) == {"hpsv2": 1.0, "pickscore": 0.5}
    reward = compose_reward(
        "+reward=hpsv2", "reward.weights.hpsv2=0", "reward.weights.clipscore=2", "reward.eval=[]"
    )
    assert (
        check_weights(reward["weights"], reward["catalogue"]) == {"clipscore": 2.0} and reward["eval"] == []
    )


def test_the_same_classes_read_published_and_shapes_scorers():
    shapes, published = (
        compose_reward("+reward=hpsv2", scorers=s)["catalogue"] for s in ("shapes", "published")
    )
    assert {k: v["_target_"] for k, v in shapes.items()} == {k: v["_target_"] for k, v in published.items()}
    assert published["hpsv2"]["model"] == "ViT-H-14"
    assert published["hpsv2"]["checkpoint"].endswith("/HPS_v2.1_compressed.pt")


def test_all_rewards_build_from_the_config_and_score(scorers_here):
    reward = compose_reward("+reward=hpsv2_clipscore", *scorers_here)
    built = build_rewards(reward["catalogue"], reward["eval"])
    assert list(built) == ["hpsv2", "clipscore", "pickscore", "shapes_verifier"]
    mix = WeightedReward(built, reward["weights"], reward["batch_size"])
    prompts = prompts_of(*["a red square on a white background"] * 3)
    mix.check_prompts(prompts)
    scores = mix.score(pictures(3), prompts)
    torch.testing.assert_close(scores.total_B, scores.parts["hpsv2"] + scores.parts["clipscore"])


def test_missing_files_of_all_rewards_come_at_once_and_before_loading(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    reward = compose_reward("+reward=hpsv2", f"model.scorers.dir={tmp_path}", scorers="published")
    lacks = missing_files(reward["eval"], reward["catalogue"])
    assert [line.split()[0] for line in lacks] == ["hpsv2", "clipscore", "pickscore"]
    assert f"hf download xswu/HPSv2 HPS_v2.1_compressed.pt --local-dir {tmp_path}" in lacks[0]
    with pytest.raises(
        UserError, match="HPS_v2.1_compressed.pt.*clip-vit-large-patch14.*PickScore_v1"
    ) as error:
        build_rewards(reward["catalogue"], reward["eval"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"_target_": "no.such.module.Reward"}, "'mine': cannot import 'no.such.module.Reward'"),
        ({"_target_": "jaggrl.rewards.hpsv2.HPSv3"}, "cannot import"),
        ({"_target_": "Bare"}, "cannot import 'Bare'"),
        ({}, "cannot import ''"),
        ({"_target_": "jaggrl.rewards.hpsv2.HPSv2", "checkpont": "x"}, "'mine': .*takes checkpoint, model"),
        ({"_target_": "jaggrl.rewards.hpsv2.HPSv2"}, "missing a required argument: 'checkpoint'"),
    ],
)
def test_bad_nodes_are_refused_by_name(node, says):
    with pytest.raises(UserError, match=says):
        build_rewards({"mine": node}, ["mine"])
    with pytest.raises(UserError, match="unknown reward 'main': did you mean 'mine'"):
        build_rewards({"mine": node}, ["main"])


class Redness(Reward):
    """A user's own reward."""

    def __init__(self, gain: float, device: str = "cpu") -> None:
        self.gain = gain

    def __call__(self, media_B, prompts):
        return self.gain * media_B[:, 0].mean((1, 2))


def test_a_reward_of_ones_own_is_one_class_and_one_file(tmp_path):
    node = {
        "defaults": ["base", "_self_"],
        "weights": {"redness": 1},
        "catalogue": {"redness": {"_target_": f"{__name__}.Redness", "gain": 2.0}},
    }
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "base.yaml").write_text((CONF / "reward" / "base.yaml").read_text())
    (tmp_path / "reward" / "redness.yaml").write_text(yaml.safe_dump(node))
    (tmp_path / "scorers").symlink_to(CONF / "scorers")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose(overrides=["+scorers@model.scorers=shapes", "+reward=redness"])
    reward = OmegaConf.to_container(config.reward, resolve=True)
    built = build_rewards(reward["catalogue"], check_weights(reward["weights"], reward["catalogue"]))
    media = pictures(2)
    total = WeightedReward(built, reward["weights"]).score(media, prompts_of("a", "b")).total_B
    torch.testing.assert_close(total, 2 * media[:, 0].mean((1, 2)))
