"""The probe on toys: cosines, signal, costs, tables, presets; nothing of the trainer is moved."""

import json
import math

import pytest
import torch
import yaml
from hydra.utils import instantiate

from jaggrl.algorithms.diffusion_nft import DiffusionNFT
from jaggrl.algorithms.policy_gradient import PolicyGradient
from jaggrl.backward.interpolants import Ends, Lagrange, Linear, Subset
from jaggrl.backward.measure import Sketch
from jaggrl.backward.strategy import Backward
from jaggrl.credit import Advantage
from jaggrl.diffusion.exploration import Everywhere, Nowhere
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.errors import UserError
from jaggrl.gradient_signal import Signal, signal
from jaggrl.probe_report import ProbeReport
from jaggrl.probe_verdicts import verdicts
from jaggrl.probing import Probe
from jaggrl.rollout import Sampler
from tests.toys import ToyModel, toy_policy, toy_trainer


def probe_of(strategies, rollouts=4, steps=9, affine=False, **loop):
    after = loop.pop("after_updates", 0)
    algorithm = PolicyGradient(DanceSDE(0.3), Advantage(), clip_range=0.1)
    sampler = Sampler(DanceSchedule(steps, 3.0), Everywhere(), Euler(), DanceSDE(0.3))
    trainer = toy_trainer(algorithm, sampler, policy=toy_policy(ToyModel(affine=affine)), **loop)
    probe = Probe(trainer, strategies, after)
    probe.run(rollouts)
    return probe


def test_cosines_by_position_and_of_the_whole_update():
    probe = probe_of(
        {"jagg": Backward(Linear(), 4), "ablate": Backward(Ends(), 4), "long": Backward(Linear(), 8)}
    )
    told = probe.measured
    assert sorted(told["jagg"].positions) == [0.0, 0.5]
    assert list(told["long"].positions) == [0.0]
    assert all(len(x) == 4 for x in told["jagg"].positions.values())
    assert all(x.cosine == pytest.approx(1) and x.ratio == pytest.approx(1) for x in told["exact"].whole)
    jagg, ablate = (sum(x.cosine for x in told[n].whole) / 4 for n in ("jagg", "ablate"))
    assert jagg > ablate > 0.3
    # the whole update of one window is that window
    for whole, window in zip(told["long"].whole, told["long"].positions[0.0], strict=True):
        assert whole.cosine == pytest.approx(window.cosine, abs=1e-6)
    assert told["jagg"].passes.backwards == 4 * 2 * 2 * 2  # rollouts, micro-batches, windows, anchors
    assert told["exact"].passes.backwards == 4 * 2 * 8


@pytest.mark.parametrize("noise", ["per_step", "per_window"])
def test_every_cut_is_compared_with_its_own_exact_gradient(noise):
    """Noise drawn by window makes another exact gradient of every window length."""
    algorithm = DiffusionNFT(Advantage(), noise=noise)
    sampler = Sampler(DanceSchedule(9, 3.0), Nowhere(), Euler())
    trainer = toy_trainer(algorithm, sampler, policy=toy_policy(ToyModel()))
    strategies = {f"exact at {w}": Backward(Linear(), w, jagg_frac=0.0) for w in (2, 4, 0)}
    probe = Probe(trainer, strategies)
    probe.run(2)
    for name in strategies:
        assert all(x.cosine == pytest.approx(1) for x in probe.measured[name].whole)


def test_the_probe_moves_nothing():
    torch.manual_seed(0)
    probe = probe_of(
        {"jagg": Backward(Linear(), 4, served="corrected")}, after_updates=1, updates_per_rollout=2
    )
    fresh = toy_policy(ToyModel())
    trainer = probe.trainer
    assert trainer.policy.version == 0
    for ours, theirs in zip(trainer.policy.parameters, fresh.parameters, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


def test_corrected_velocities_come_closer_than_stale_ones_after_an_update():
    served = ("off", "corrected", "always")
    strategies = {name: Backward(Linear(), 4, served=name) for name in served}
    probe = probe_of(strategies, after_updates=1, updates_per_rollout=2, lr=0.02)
    off, corrected, stale = ([x.cosine for x in probe.measured[n].whole] for n in served)
    error = [sum(abs(a - b) for a, b in zip(x, off, strict=True)) for x in (corrected, stale)]
    assert error[0] < error[1]
    with pytest.raises(UserError, match="after_updates=1"):
        probe_of(strategies, after_updates=1)


def test_signal_of_known_vectors():
    """Estimates = a signal of norm 1 and noise of norm 2: cosine 1 / sqrt(5), SNR 1/4; pure noise is not resolved."""
    torch.manual_seed(0)
    true = torch.nn.functional.normalize(torch.randn(20000), dim=0)
    noise = 2 * torch.nn.functional.normalize(torch.randn(30, 20000), dim=1)
    seen = signal(true + noise, true + noise)
    assert seen.cosine == pytest.approx(5**-0.5, abs=0.02)
    assert seen.snr == pytest.approx(0.25, abs=0.02)
    half = signal(true + 2**0.5 * noise, true + noise)  # twice the noise power
    assert half.snr == pytest.approx(seen.snr / 2, rel=0.1)
    assert math.isnan(signal(noise[:2], noise[:2]).snr)


def test_sketch_keeps_inner_products():
    parameters = [torch.randn(300, 100), torch.randn(500)]
    grads = [[torch.randn_like(p) for p in parameters] for _ in range(2)]
    grads[1] = [0.5 * a + b for a, b in zip(*grads, strict=True)]
    whole, small = Sketch(parameters), Sketch(parameters, size=4096)
    assert whole.whole
    assert not small.whole
    exact = torch.nn.functional.cosine_similarity(whole(grads[0]), whole(grads[1]), dim=0)
    rough = torch.nn.functional.cosine_similarity(small(grads[0]), small(grads[1]), dim=0)
    assert float(rough) == pytest.approx(float(exact), abs=0.06)


def test_report_tables_and_presets(tmp_path):
    base = {"_target_": "jaggrl.backward.strategy.Backward", "window": 4, "seed": 3}
    rules = {"jagg": "Linear", "ablate": "Ends"}
    nodes = {
        n: base | {"interpolant": {"_target_": f"jaggrl.backward.interpolants.{r}"}} for n, r in rules.items()
    }
    strategies = {name: instantiate(node, _convert_="all") for name, node in nodes.items()}
    strategies["subset"] = Backward(Subset(2), 8)
    probe = probe_of(strategies, steps=21)
    report = ProbeReport(probe, nodes, {"model": "toy"})
    text = report.write(tmp_path, "jagg")
    assert "paper, FLUX" in text
    assert "0.85±0.06 | 0.96" in text
    assert report.cost("jagg", 1).units == 5 * 2 * 3
    assert report.cost("jagg", 8).units == pytest.approx(5 * (2 * 3 + 2 * 7 / 8))
    assert "0.707" in text
    report.signals["exact"] = report.signals["jagg"] = Signal(0.5, 0.3, (0.3, 0.31, 0.29, 0.3))
    assert report.efficiency("exact", 1) == pytest.approx((1, 1, 1))
    assert report.efficiency("jagg", 1)[0] == pytest.approx((21 + 60) / (21 + 30))
    stored = json.loads((tmp_path / "probe.json").read_text())
    assert len(stored["strategies"]["jagg"]["positions"]) == 5
    assert stored["strategies"]["exact"]["passes_per_micro_batch"]["backwards"] == 20
    assert (tmp_path / "probe.png").stat().st_size > 0
    for preset in ("probed", "frontier"):
        node = yaml.safe_load((tmp_path / f"backward/{preset}.yaml").read_text())
        assert node["seed"] == "${seed}"
    node = yaml.safe_load((tmp_path / "backward/probed.yaml").read_text())
    assert instantiate(node | {"seed": 0}, _convert_="all").jagg_frac == report.jagg_frac("jagg")


def test_verdicts_are_paired_and_told_either_way():
    cosines = {
        "exact": [1.0] * 3,
        "jagg": [0.8, 0.7, 0.9],
        "ablate": [0.7, 0.61, 0.8],
        "ours": [0.9, 0.81, 1.0],
    }
    costs = {"exact": 12.0, "jagg": 6.0, "ablate": 6.0, "ours": 6.0}
    lines = verdicts(cosines, costs, ["jagg"], lambda a, b: True)
    assert lines[0].startswith("jagg beats ablate (as many backwards): cosine +0.097")
    assert lines[1].startswith("jagg loses to ours")
    assert lines[2].startswith("dominating jagg (higher cosine at no more cost): ours (6 against 6) +0.103")
    assert verdicts(cosines, costs | {"ours": 7.0}, ["jagg"], lambda a, b: False)[-1].endswith("none")


def test_routes_and_the_frontier_follow_the_measurements():
    probe = probe_of({"jagg": Backward(Linear(), 4), "quadratic": Backward(Lagrange(3), 8)}, rollouts=1)
    report = ProbeReport(probe, {}, {})
    positions = probe.measured["jagg"].positions
    for cosines, fraction in (((0.9, 0.6), 1.0), ((0.6, 0.4), 0.5), ((0.4, 0.9), 0.0)):
        for p, cosine in zip(sorted(positions), cosines, strict=True):
            positions[p] = [type(positions[p][0])(cosine, 1.0, 1.0)]
        assert report.jagg_frac("jagg") == fraction
    likeness = type(probe.measured["jagg"].whole[0])
    probe.measured["jagg"].whole = [likeness(0.95, 1.0, 1.0)]
    probe.measured["quadratic"].whole = [likeness(0.85, 1.0, 1.0)]
    assert report.frontier() == "jagg"
    probe.measured["quadratic"].whole = [likeness(0.92, 1.0, 1.0)]
    assert report.frontier() == "quadratic"
    probe.measured["quadratic"].whole = probe.measured["jagg"].whole = [likeness(0.2, 1.0, 1.0)]
    assert report.frontier() == "exact"
