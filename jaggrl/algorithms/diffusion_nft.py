"""DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on re-noised endpoints, without ratios.

It follows ``scripts/train_nft_sd3.py`` and ``config/nft.py`` of NVlabs/DiffusionNFT. Where it leaves them:

1. Steps are trained in falling t (a prefix of the schedule), so that windows exist; the script permutes
   them per sample, which changes the order and nothing else at fraction 0.99.
2. ``noise=per_window`` gives all steps of a window one noise: then the window's states lie on the affine
   path that JAGG's Theorem 1 asks for. The paper's fresh noise per step is the default. A comparison must
   use one setting throughout.
3. A state is noised with sigma and fed at t; both are the same number on the model's own schedule.
4. ``adaptive_weight=false`` is the paper's objective in velocities, without the script's data-space weights.
5. Failed scores weigh nothing, and the denominators are the optimizer step's.
6. Two knobs are for diagnosis and not in the script: ``anchor=current`` (sampling stays lagged, ``v_old``
   does not) and ``branches`` (train one branch alone). The script's ``adv_mode`` clamps advantages;
   ``positive_only`` there still trains both branches, with r >= 1/2.
7. While the lagged policy is the current one (decay 0, first update), its outputs serve the no-grad middle
   steps.

Conventions: v ~ u = eps - x0, ``x_t = (1 - sigma) x0 + sigma eps``, so that ``x0^ - x0 = -sigma (v - u)``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggrl.algorithms.base import Algorithm, advantage_stats, batch_of, log, velocities_of
from jaggrl.credit import Advantage, optimality
from jaggrl.diffusion.grouping import Group, cut, eligible
from jaggrl.diffusion.kernels import mean_d
from jaggrl.diffusion.noise import generator, normal
from jaggrl.errors import UserError, unknown
from jaggrl.models.policy import Policy
from jaggrl.trajectory import Batch, Scored, Trajectory
from jaggrl.window import StepLoss, Window

DECAYS: dict[str, Callable[[int], float]] = {
    "none": lambda i: 0.0,  # decay_type 0: on-policy
    "linear": lambda i: min(0.001 * i, 0.5),  # decay_type 1: geneval, pickscore, hpsv2, multi_reward
    "delayed": lambda i: 0.0 if i < 75 else min(0.0075 * (i - 75), 0.999),  # decay_type 2: ocr
}
"""How much of the lagged policy stays, by the count of optimizer steps."""

ADV_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda a: a,
    "positive_only": lambda a: a.clamp_min(0),
    "negative_only": lambda a: a.clamp_max(0),
    "one_only": lambda a: (a > 0).float(),
    "binary": torch.sign,
}
NOISES = ("per_step", "per_window")
ANCHORS = ("old", "current")
BRANCHES = ("both", "positive", "negative")


@dataclass(frozen=True)
class _States:
    """A micro-batch's noised states of all K trained steps, and the other policies' raw outputs there."""

    steps: list[int]
    t_KB: Tensor
    sigma_K: list[float]
    z_K: list[Tensor]
    u_K: list[Tensor]
    """``eps - x0``."""
    old_K: list[Tensor] | None
    reference_K: list[Tensor] | None


class DiffusionNFT(Algorithm):
    """Implicit branches ``v+- = (1 -+ beta) v_old +- beta v`` fit to samples by their optimality r."""

    behaviour = "old"

    def __init__(
        self,
        advantage: Advantage,
        adv_mode: str = "all",
        nft_beta: float = 1.0,
        kl_coef: float = 1e-4,
        adaptive_weight: bool = True,
        decay: str | float = "linear",
        noise: str = "per_step",
        timestep_fraction: float = 0.99,
        anchor: str = "old",
        branches: str = "both",
    ) -> None:
        """
        Args:
            advantage: how rewards become advantages; its ``clip`` also maps them to r.
            adv_mode: what of the advantages counts (``ADV_MODES``).
            nft_beta: strength of the implicit branches (the script's ``config.beta``).
            kl_coef: weight of ``mean_d (v - v_ref)^2`` (the script's ``train.beta``).
            adaptive_weight: divide each branch by its own mean absolute error in data space.
            decay: of the lagged policy: a name (``DECAYS``) or a constant in [0, 1).
            noise: ``per_step`` or ``per_window``.
            timestep_fraction: share of the schedule's steps that are trained, the noisiest first.
            anchor: ``v_old`` of the ``old`` policy, or the ``current`` one's own output, detached.
            branches: ``both``, or one alone.
        """
        for key, value, choices in (
            ("adv_mode", adv_mode, ADV_MODES),
            ("noise", noise, NOISES),
            ("anchor", anchor, ANCHORS),
            ("branches", branches, BRANCHES),
        ):
            if value not in choices:
                raise unknown(f"algorithm.{key}", value, choices)
        if isinstance(decay, str) and decay not in DECAYS:
            raise unknown("algorithm.decay", decay, DECAYS)
        if not isinstance(decay, str) and not 0 <= decay < 1:
            raise UserError(
                f"algorithm.decay={decay} is outside [0, 1); use {', '.join(DECAYS)} or a constant"
            )
        if not nft_beta > 0 or kl_coef < 0:
            raise UserError(f"algorithm.nft_beta={nft_beta} must be > 0 and kl_coef={kl_coef} >= 0")
        eligible(1000, timestep_fraction)
        self.advantage = advantage
        self.adv_mode = adv_mode
        self.nft_beta = nft_beta
        self.kl_coef = kl_coef
        self.adaptive_weight = adaptive_weight
        self.decay = decay
        self.noise = noise
        self.timestep_fraction = timestep_fraction
        self.anchor = anchor
        self.branches = branches
        self.needs = ("reference",) if kl_coef > 0 else ()
        self._rollout: tuple[int, int] = (0, 0)

    def check(self, interpolates: bool, init_noise: str, explores: bool, updates: int, group: int) -> None:
        """Also refuses stochastic rollouts and shared initial noise; says when JAGG's path is not there."""
        super().check(interpolates, init_noise, explores, updates, group)
        self._check_ode(init_noise, explores)
        if interpolates and self.noise == "per_step":
            log.warning(
                "algorithm.noise=per_step leaves no path between a window's states to interpolate along; "
                "algorithm.noise=per_window gives one"
            )

    def lag(self, updates: int) -> float:
        """The decay after ``updates`` optimizer steps."""
        return DECAYS[self.decay](updates) if isinstance(self.decay, str) else self.decay

    def credit(self, scored: Scored) -> Batch:
        """``r = clamp(A / (2c) + 1/2, 0, 1)``."""
        advantage_N = self.advantage(scored.parts_N, scored.weights, scored.group_size)
        r_N = optimality(ADV_MODES[self.adv_mode](advantage_N), self.advantage.clip)
        stats = advantage_stats(advantage_N) | {"train/r_mean": float(r_N.mean())}
        return batch_of(scored, {"r": r_N}, stats=stats)

    def trained_steps(self, trajectory: Trajectory) -> list[int]:
        """``int(S * timestep_fraction)`` steps; 0.99 drops the last one."""
        return list(range(eligible(len(trajectory.noisy_S), self.timestep_fraction)))

    def groups(
        self, trajectory: Trajectory, rollout: int, window: int | Sequence[int], seed: int
    ) -> list[Group]:
        """Windows over the trained steps; remembers the rollout's number, which seeds the noise."""
        self._rollout = (seed, rollout)
        return cut(self.trained_steps(trajectory), window)

    def after_rollout(self, policy: Policy, updates: int) -> dict[str, float]:
        """``theta_old <- decay theta_old + (1 - decay) theta``."""
        decay = self.lag(updates)
        policy.shadows.lerp("old", decay)
        return {"train/decay": decay}

    @property
    def references(self) -> int:
        """``v_old``, unless it is the current policy's own output, and the reference of a KL."""
        return int(self.anchor == "old") + len(self.needs)

    def windows(self, micro: Batch, policy: Policy, groups: Sequence[Group]) -> Iterator[Window]:
        """One window per group; the other policies run over all of the micro-batch's states first."""
        states = self._states(micro, policy, groups)
        start = 0
        for group in groups:
            rows = range(start, start + len(group.steps))
            start = rows.stop
            yield self._window(micro, policy, states, rows, group.position)

    def _states(self, micro: Batch, policy: Policy, groups: Sequence[Group]) -> _States:
        tr = micro.trajectory
        steps = [i for g in groups for i in g.steps]
        streams = [g.steps[0] if self.noise == "per_window" else i for g in groups for i in g.steps]
        noises = [self._noise(micro, stream) for stream in streams]
        t_KB = tr.t_S[steps].unsqueeze(1).expand(-1, len(tr.samples))
        ts = list(t_KB.to(policy.device))
        sigma_K = tr.sigma_S[steps].tolist()
        zs = [(1 - sigma) * tr.x0_B + sigma * eps for sigma, eps in zip(sigma_K, noises, strict=True)]
        old = velocities_of(policy, "old", zs, ts, tr.condition) if self.anchor == "old" else None
        reference = velocities_of(policy, "reference", zs, ts, tr.condition) if self.kl_coef > 0 else None
        return _States(steps, t_KB, sigma_K, zs, [eps - tr.x0_B for eps in noises], old, reference)

    def _window(self, micro: Batch, policy: Policy, states: _States, rows: range, position: float) -> Window:
        """The window over ``rows`` of all trained steps."""
        tr = micro.trajectory
        t = states.t_KB.to(policy.device)
        # the lagged policy was the current one when the rollout began if the last lag was 0
        fresh = policy.version == tr.version and (tr.version == 0 or self.lag(tr.version) == 0)
        old = states.old_K if fresh else None

        def velocities(js: Sequence[int]) -> list[Tensor]:
            return policy.velocities(
                [states.z_K[rows[j]] for j in js], [t[rows[j]] for j in js], tr.condition
            )

        return Window(
            t_WB=states.t_KB[rows.start : rows.stop],
            position=position,
            velocities=velocities,
            loss=lambda j, raw: self._loss(micro, policy, states, rows[j], raw),
            stored=(lambda j: old[rows[j]]) if old is not None else None,
            fresh=fresh,
        )

    def _noise(self, micro: Batch, stream: int) -> Tensor:
        """Fresh noise (B, ...) by the seed rule: the same on any rank and in any micro-batch."""
        tr = micro.trajectory
        draws = [generator(*self._rollout, s.prompt_index, s.member, "forward", stream) for s in tr.samples]
        return normal(draws, tr.x0_B.shape[1:], tr.x0_B.device)

    def _loss(self, micro: Batch, policy: Policy, states: _States, k: int, raw: Tensor) -> StepLoss:
        """``c [r l+ + (1 - r) l-] / beta + kl_coef mean_d (v - v_ref)^2`` per sample, weighted and summed."""
        v = policy.model.guide(raw).float()
        v_old = v.detach() if states.old_K is None else policy.model.guide(states.old_K[k]).float()
        u, sigma, beta, r = states.u_K[k], states.sigma_K[k], self.nft_beta, micro.credit["r"]
        positive = r * self._branch((1 - beta) * v_old + beta * v - u, sigma)
        negative = (1 - r) * self._branch((1 + beta) * v_old - beta * v - u, sigma)
        both = {"both": positive + negative, "positive": positive, "negative": negative}[self.branches]
        loss_B = both * self.advantage.clip / beta
        drift_B = mean_d((v.detach() - v_old) ** 2)
        stats = {"policy_loss": loss_B.detach().mean(), "drift": drift_B.mean().sqrt()}
        if states.reference_K is not None:
            kl_B = mean_d((v - policy.model.guide(states.reference_K[k]).float()) ** 2)
            loss_B = loss_B + self.kl_coef * kl_B
            stats["kl"] = kl_B.detach().mean()
        return StepLoss((micro.weight_B * loss_B).sum() / len(states.steps), stats)

    def _branch(self, error: Tensor, sigma: float) -> Tensor:
        """From ``v+- - u``: ``mean_d (x0^ - x0)^2 / max(mean_d |x0^ - x0|, 1e-5)``, or the mean square."""
        if not self.adaptive_weight:
            return mean_d(error**2)
        error = sigma * error
        weight = mean_d(error.detach().abs().double()).clamp_min(1e-5)
        return mean_d(error**2) / weight.to(error.dtype)
