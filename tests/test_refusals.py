"""Combinations that make no sense, provoked through the real config: each is refused, and says why and what to do.

Run it as a script (``python -m tests.test_refusals``) to print them.
"""

import os
from unittest import mock

import pytest

from jaggrl.build import check
from jaggrl.errors import UserError
from tests.test_config import composed

NOWHERE = "algorithm.rollout.exploration={_target_: jaggrl.diffusion.exploration.Nowhere}"
EVERYWHERE = "algorithm.rollout.exploration={_target_: jaggrl.diffusion.exploration.Everywhere}"
CPS = "algorithm.kernel={_target_: jaggrl.diffusion.kernels.FlowCPS, noise_level: 0.8}"

REFUSED: dict[str, tuple[list[str], str]] = {
    "policy gradient, ODE rollout": (["algorithm=dance_grpo", NOWHERE], "needs stochastic steps"),
    "policy gradient, permuted steps, jagg": (
        ["algorithm=dance_grpo", "algorithm.steps=permute", "backward=jagg"],
        "algorithm.steps=permute breaks windows",
    ),
    "policy gradient, permuted steps, quadratic": (
        ["algorithm=flow_grpo", "algorithm.steps=permute", "backward=quadratic"],
        "algorithm.steps=permute breaks windows",
    ),
    "best-of-n beyond the group": (
        ["algorithm=dance_grpo", "+algorithm.best_of_n=8", "group_size=4"],
        "algorithm.best_of_n=8 exceeds group_size=4",
    ),
    "noise without a kernel": (
        ["algorithm=dance_grpo", "algorithm.rollout.kernel=null"],
        "rollout.kernel is null",
    ),
    "GRPO-Guard, CPS kernel": (["algorithm=grpo_guard", CPS], "algorithm.guard needs"),
    "KL to the reference, CPS kernel, last step": (
        ["algorithm=flow_grpo_fast", "algorithm.kl_coef=0.04", "algorithm.ignore_last=false"],
        "the last step of FlowCPS",
    ),
    "random window beyond the schedule": (
        ["algorithm=flow_grpo_fast", "algorithm.rollout.schedule.steps=4"],
        "does not fit 4 steps",
    ),
    "sliding window, two steps": (
        ["algorithm=mixgrpo", "algorithm.rollout.schedule.steps=2"],
        "no room for a sliding window",
    ),
    "so small a fraction that nothing is trained": (
        ["algorithm=flow_grpo_fast", "algorithm.timestep_fraction=0.3"],
        "of 3 transitions trains none",
    ),
    "a sliding window that shrinks at the end until nothing is trained": (
        ["algorithm=mixgrpo", "algorithm.timestep_fraction=0.6", "rollouts=1000"],
        "of 1 transitions trains none",
    ),
    "random windows longer than what is trained": (
        ["algorithm=flow_grpo_fast", "++algorithm.steps=random_windows", "backward.window=4"],
        "3 trained steps hold no window of backward.window=4",
    ),
    "MixGRPO-Flash, the model's own schedule": (
        [
            "algorithm=mixgrpo_flash",
            "algorithm.rollout.schedule={_target_: jaggrl.diffusion.schedule.ModelSchedule, steps: 10}",
            "~algorithm.rollout.schedule.shift",
        ],
        "rollout.after_window needs DanceSchedule",
    ),
    "DiffusionNFT, stochastic rollout": (["algorithm=diffusion_nft", EVERYWHERE], "deterministic rollouts"),
    "DiffusionNFT, one noise per prompt": (
        ["algorithm=diffusion_nft", "algorithm.rollout.init_noise=group"],
        "init_noise=group makes all samples of a prompt equal",
    ),
    "DiffusionNFT, one noise for the rollout": (
        ["algorithm=diffusion_nft", "algorithm.rollout.init_noise=rollout"],
        "init_noise=rollout makes all samples of a prompt equal",
    ),
    "DiffusionART, stochastic rollout": (["algorithm=diffusion_art", EVERYWHERE], "deterministic rollouts"),
    "DiffusionART, one noise per prompt": (
        ["algorithm=diffusion_art", "algorithm.rollout.init_noise=group"],
        "init_noise=group makes all samples of a prompt equal",
    ),
    "DiffusionART, a group that two updates cannot share": (
        ["algorithm=diffusion_art", "group_size=9"],
        "group_size=9 does not split evenly",
    ),
    "DiffusionART-Pairwise, odd group": (
        ["algorithm=diffusion_art_pairwise", "group_size=9"],
        "group_size=9 does not make pairs",
    ),
    "a group of one": (
        ["group_size=1", "updates_per_rollout=1"],
        "group_size=1 gives no PolicyGradient credit",
    ),
    "more updates than a group has samples": (
        ["group_size=4", "updates_per_rollout=5"],
        "updates_per_rollout=5 exceeds group_size=4",
    ),
    "samples that three ranks cannot share": (
        ["WORLD_SIZE=3", "prompts_per_rollout=4", "group_size=4", "updates_per_rollout=1"],
        "use prompts_per_rollout=3",
    ),
    "replicas that do not divide the ranks": (
        ["WORLD_SIZE=4", "distributed.replicas=3", "prompts_per_rollout=4", "group_size=4"],
        "distributed.replicas=3 does not divide 4 ranks",
    ),
    "DiffusionART, velocities predicted by a feature cache": (
        ["algorithm=diffusion_art", "rollout_cache=taylorseer"],
        "use rollout_cache=null",
    ),
    "rewards whose weights are not here": (
        ["scorers@model.scorers=published", "model.scorers.dir=/nowhere"],
        "hpsv2 needs /nowhere/HPS_v2.1_compressed.pt",
    ),
}
"""What it is -> (overrides, and with WORLD_SIZE=n the number of ranks; what the message says)."""


def refusal(overrides: list[str]) -> str:
    """The message with which the config is refused, empty when it is taken."""
    ranks = [o.partition("=")[2] for o in overrides if o.startswith("WORLD_SIZE=")]
    with mock.patch.dict(os.environ, {"WORLD_SIZE": ranks[0] if ranks else "1"}):
        try:
            check(composed(*[o for o in overrides if not o.startswith("WORLD_SIZE=")]))
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_combination_is_refused_before_weights_are_loaded(name: str) -> None:
    overrides, expected = REFUSED[name]
    message = refusal(overrides)
    assert expected in message
    assert "\n" not in message


def print_refusals() -> bool:
    """Provoke and print every refusal; whether all came as expected."""
    good = 0
    print("\nCombinations that are refused, and why:")
    for name, (overrides, expected) in REFUSED.items():
        message = refusal(overrides)
        refused = expected in message
        good += refused
        print(f"  {name}\n      {' '.join(overrides)}\n      {message or 'NOT REFUSED'}", flush=True)
        if message and not refused:
            print(f"      UNEXPECTED: should say {expected!r}")
    print(f"{good} of {len(REFUSED)} combinations were refused as expected")
    return good == len(REFUSED)


if __name__ == "__main__":
    raise SystemExit(0 if print_refusals() else 1)
