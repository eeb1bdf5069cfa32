"""Schedule goldens: what each repository feeds its networks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jaggrl.diffusion.schedule import DanceSchedule, ModelSchedule
from jaggrl.errors import UserError

DANCE = {
    21: "1000 983 966 947 927 905 882 857 829 799 767 731 692 648 599 545 483 413 333 240 130",
    20: "1000 982 964 944 923 900 874 847 818 785 750 710 666 617 562 500 428 346 250 136",
    16: "1000 978 954 928 900 868 833 794 750 700 642 576 500 409 300 166",
    12: "1000 970 937 900 857 807 750 681 599 500 375 214",
}


@pytest.mark.parametrize("steps", DANCE)
def test_dance_feeds_truncated_integers(steps):
    schedule = DanceSchedule(steps, 3.0)(None)
    assert [round(1000 * t) for t in schedule.t_S.tolist()] == [int(x) for x in DANCE[steps].split()]
    assert torch.equal(schedule.t_S, torch.tensor([int(x) for x in DANCE[steps].split()]) / 1000)


def test_dance_sigma_is_not_truncated():
    schedule = DanceSchedule(20, 3.0)(None)
    assert schedule.sigma_S[0] == 1 and schedule.sigma_S[-1] == 0 and len(schedule.sigma_S) == 21
    assert float(schedule.sigma_S[12]) == pytest.approx(2 / 3, abs=1e-6)
    assert float(schedule.t_S[12]) == pytest.approx(0.666, abs=1e-6)


def golden(text):
    return torch.tensor([float(x) for x in text.split()])


def through(sigmas, steps):
    schedule = ModelSchedule(steps)(lambda n: sigmas)
    assert torch.equal(schedule.t_S, schedule.sigma_S[:-1])
    return schedule.sigma_S


def scheduler(**config):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


def test_sd3_shifts_twice():
    sd3 = scheduler(shift=3.0)
    sd3.set_timesteps(10)
    want = golden("1.0 .9601 .9133 .8577 .7904 .7073 .6022 .4649 .2780 .0089 0")
    assert torch.allclose(through(sd3.sigmas, 10), want, atol=6e-5)


def test_flux_shifts_by_resolution():
    """FLUX.1-dev's scheduler config at 512 px, through the adapter."""
    from jaggrl.models.flux import Flux

    flux = Flux.__new__(Flux)
    config = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}
    flux.pipeline = SimpleNamespace(scheduler=scheduler(use_dynamic_shifting=True, shift=3.0, **config))
    flux.latent_shape = (16, 64, 64)
    want = golden("1.0 .9037 .7897 .6525 .4842 .2730 0")
    assert torch.allclose(ModelSchedule(6)(flux.sigmas).sigma_S, want, atol=6e-5)


def test_qwen_stretches_to_its_terminal():
    qwen = scheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    slope = (0.9 - 0.5) / (8192 - 256)
    qwen.set_timesteps(sigmas=np.linspace(1, 1 / 10, 10), mu=slope * 1024 + 0.5 - 256 * slope)
    want = golden("1.0 .9290 .8515 .7666 .6733 .5701 .4555 .3274 .1833 .0200 0")
    assert torch.allclose(through(qwen.sigmas, 10), want, atol=6e-5)


@pytest.mark.parametrize(
    "bad", [lambda: DanceSchedule(1), lambda: ModelSchedule(1), lambda: DanceSchedule(9, 0.0)]
)
def test_bad_values_are_one_line(bad):
    with pytest.raises(UserError, match="use at least 2|must be > 0"):
        bad()
