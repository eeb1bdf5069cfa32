"""Clipped policy gradient on denoising steps: DanceGRPO, Flow-GRPO, Flow-GRPO-Fast, MixGRPO, GRPO-Guard.

They are YAML files over this one class. It follows the reference repositories (DanceGRPO, flow_grpo,
MixGRPO); where it leaves them or their papers:

1. The log-probability is the mean over latent dimensions, as in all reference code (JAGG Eq. 5 prints a sum).
2. The clip is one-sided per sign of the advantage (PPO's max): a step outside the interval on the harmless
   side keeps its gradient, unlike JAGG's remark.
3. Old log-probabilities are the rollout's, never recomputed, so that a drift of precision shows in the ratio.
4. The objective is a mean over samples and trained steps of one optimizer step, over all ranks:
   micro-batches and leftovers never change it. (DanceGRPO drops samples that do not divide; flow_grpo drops
   samples of all-equal groups on SD3 and rescales with it. An all-equal group has advantage 0 here, and
   counts.)
5. DanceGRPO permutes steps per sample, which destroys windows: ``steps=permute`` goes with
   ``backward=exact`` alone. The default trains a prefix of the trajectory, the noisiest steps.
6. GRPO-Guard's bias term is taken per sample (flow_grpo averages it over the batch by accident), and its
   1/|delta| is off by default.
7. KL forms: ``kernel`` is flow_grpo's ``mean_d (mu - mu_ref)^2 / (2 g^2)``, without the step length;
   ``velocity`` is ``mean_d (v - v_ref)^2``.
8. Best-of-n selects within each group (DanceGRPO: over a rank's whole batch) and drops the others' work.
9. Stochastic windows are drawn once per rollout for all ranks. (flow_grpo draws one per rank and
   micro-batch, so that members of a group may explore at different steps; its Qwen pipeline draws the same
   one for ever.)
10. MixGRPO's reward trimming (``trimmed_ratio``, 0 in its scripts) is left out.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jaggrl.algorithms.base import (
    Algorithm,
    advantage_stats,
    batch_of,
    log,
    take_steps,
    velocities_of,
    without_idle_rows,
)
from jaggrl.algorithms.ratio import cache_stats, clipped_loss, guarded_log_ratio, ratio_stats
from jaggrl.credit import Advantage, best_of
from jaggrl.diffusion.grouping import Group, cut, eligible
from jaggrl.diffusion.kernels import FlowCPS, Kernel, Transition, mean_d
from jaggrl.diffusion.noise import generator
from jaggrl.errors import UserError
from jaggrl.models.policy import Policy
from jaggrl.trajectory import Batch, Scored, Trajectory
from jaggrl.window import StepLoss, Window

KL_FORMS = ("kernel", "velocity")
STEP_ORDERS = ("noisiest", "random_windows", "permute")


class PolicyGradient(Algorithm):
    """GRPO over stochastic denoising steps (JAGG Eq. 3-5)."""

    def __init__(
        self,
        kernel: Kernel,
        advantage: Advantage,
        clip_range: float = 1e-4,
        timestep_fraction: float = 1.0,
        steps: str = "noisiest",
        ignore_last: bool = True,
        kl_coef: float = 0.0,
        kl_form: str = "kernel",
        guard: bool = False,
        guard_reweight: bool = False,
        best_of_n: int | None = None,
    ) -> None:
        """
        Args:
            kernel: the rollout's transition kernel.
            advantage: how rewards become advantages.
            clip_range: epsilon of the clip; the log-probability is a mean over dimensions: 1e-4 is a
                natural scale.
            timestep_fraction: share of the stochastic transitions that an update trains on.
            steps: ``noisiest`` (a prefix), ``random_windows`` (whole windows, drawn per rollout) or
                ``permute``.
            ignore_last: never train the last transition, whose Gaussian is too sharp.
            kl_coef: weight of the KL to the reference (0 = none, no reference forwards).
            kl_form: ``kernel`` or ``velocity``.
            guard: GRPO-Guard's ratio normalisation.
            guard_reweight: also divide each step's policy loss by its |delta sigma|.
            best_of_n: train on the best and worst n/2 of each group only (null = all).
        """
        if not clip_range > 0:
            raise UserError(f"algorithm.clip_range={clip_range} must be > 0; the papers use 1e-5 to 0.1")
        if steps not in STEP_ORDERS:
            raise UserError(f"algorithm.steps={steps} is unknown; use {', '.join(STEP_ORDERS)}")
        if kl_form not in KL_FORMS:
            raise UserError(f"algorithm.kl_form={kl_form} is unknown; use {' or '.join(KL_FORMS)}")
        if kl_coef < 0:
            raise UserError(f"algorithm.kl_coef={kl_coef} must be >= 0")
        if best_of_n is not None and best_of_n < 2:
            raise UserError(f"algorithm.best_of_n={best_of_n} must be at least 2, or null for all samples")
        if guard and isinstance(kernel, FlowCPS):
            raise UserError(
                "algorithm.guard needs the log-probability of an SDE kernel; use FlowSDE, or guard=false"
            )
        eligible(1000, timestep_fraction)
        self.kernel = kernel
        self.advantage = advantage
        self.clip_range = clip_range
        self.timestep_fraction = timestep_fraction
        self.steps = steps
        self.ignore_last = ignore_last
        self.kl_coef = kl_coef
        self.kl_form = kl_form
        self.guard = guard
        self.guard_reweight = guard_reweight
        self.best_of_n = best_of_n
        self.record = frozenset({"states", "velocities", "log_prob"} | ({"mean"} if guard else set()))
        self.needs = ("reference",) if kl_coef > 0 else ()
        self._rollout: tuple[int, int] = (0, 0)

    def check(self, interpolates: bool, init_noise: str, explores: bool, updates: int, group: int) -> None:
        """Also refuses ODE rollouts, permuted steps under interpolation, and a best-of-n beyond the group."""
        super().check(interpolates, init_noise, explores, updates, group)
        if not explores:
            raise UserError(
                "a policy gradient needs stochastic steps; set algorithm.rollout.exploration to a window"
            )
        if self.steps == "permute" and interpolates:
            raise UserError(
                "algorithm.steps=permute breaks windows of steps; use backward=exact, or steps=random_windows"
            )
        if self.best_of_n is not None and self.best_of_n > group:
            raise UserError(f"algorithm.best_of_n={self.best_of_n} exceeds group_size={group}; lower it")
        if self.kl_coef > 0 and not self.ignore_last and isinstance(self.kernel, FlowCPS):
            raise UserError(
                "the last step of FlowCPS has no noise to divide the KL by; use algorithm.ignore_last=true"
            )
        if self.clip_range > 1e-4 and isinstance(self.kernel, FlowCPS):
            log.warning("clip_range=%g hardly ever clips with FlowCPS, whose scale is 1e-5", self.clip_range)

    def trained_share(self, group: int) -> float:
        """``best_of_n`` of the group."""
        return 1.0 if self.best_of_n is None else min(1.0, self.best_of_n / group)

    def credit(self, scored: Scored) -> Batch:
        """Group-relative advantages over the whole rollout."""
        advantage_N = self.advantage(scored.parts_N, scored.weights, scored.group_size)
        credit_N, stats = {"advantage": advantage_N}, advantage_stats(advantage_N)
        if self.best_of_n is None or self.best_of_n >= scored.group_size:
            return batch_of(scored, credit_N, stats=stats)
        kept_N = best_of(advantage_N, scored.total_N.isfinite(), scored.group_size, self.best_of_n)
        return without_idle_rows(batch_of(scored, credit_N, kept_N=kept_N, stats=stats))

    def trained_steps(self, trajectory: Trajectory) -> list[int]:
        """Stochastic transitions, without the last one of the trajectory when ``ignore_last``."""
        end = len(trajectory.noisy_S) - int(self.ignore_last)
        return [i for i, noisy in enumerate(trajectory.noisy_S[:end]) if noisy]

    def groups(
        self, trajectory: Trajectory, rollout: int, window: int | Sequence[int], seed: int
    ) -> list[Group]:
        """Windows over the eligible transitions; ``random_windows`` draws whole windows for all ranks."""
        self._rollout = (seed, rollout)
        trained = self.trained_steps(trajectory)
        count = eligible(len(trained), self.timestep_fraction)
        if self.steps == "random_windows":
            whole = [g for g in cut(trained, window) if g.position < 1.0]
            if not whole:
                raise UserError(
                    f"algorithm.steps=random_windows: {len(trained)} trained steps hold no window of "
                    f"backward.window={window}; shorten it"
                )
            keep = max(1, round(count / max(1, len(trained)) * len(whole)))
            drawn = torch.randperm(len(whole), generator=generator(seed, rollout, "windows"))[:keep]
            return [whole[i] for i in sorted(drawn.tolist())]
        return cut(trained[:count], window)

    def windows(self, micro: Batch, policy: Policy, groups: Sequence[Group]) -> Iterator[Window]:
        """One window per group; states are the rollout's own, so that velocities can be served."""
        step_KB = self._steps_of_samples(micro, groups)
        reference = self._reference(micro, policy, step_KB)
        start = 0
        for group in groups:
            end = start + len(group.steps)
            yield self._window(
                micro, policy, step_KB, slice(start, end), reference[start:end], group.position
            )
            start = end

    def _steps_of_samples(self, micro: Batch, groups: Sequence[Group]) -> Tensor:
        """Step indices (K, B) of all K trained steps: the groups' own, or each sample's own permutation."""
        tr = micro.trajectory
        flat = torch.tensor([i for g in groups for i in g.steps])
        if self.steps != "permute":
            return flat.unsqueeze(1).expand(-1, len(tr.samples))
        trained = torch.tensor(self.trained_steps(tr))
        draws = [generator(*self._rollout, "permute", s.index) for s in tr.samples]
        return torch.stack(
            [trained[torch.randperm(len(trained), generator=g)[: len(flat)]] for g in draws], 1
        )

    def _reference(self, micro: Batch, policy: Policy, step_KB: Tensor) -> list[Tensor | None]:
        """The reference's guided velocities of all trained steps; Nones without KL."""
        if self.kl_coef == 0:
            return [None] * len(step_KB)
        tr, step = micro.trajectory, step_KB.to(policy.device)
        zs = [take_steps(tr.recorded["states"], row) for row in step]
        raws = velocities_of(policy, "reference", zs, list(tr.t_S[step_KB].to(step.device)), tr.condition)
        return [policy.model.guide(raw).float() for raw in raws]

    def _window(
        self,
        micro: Batch,
        policy: Policy,
        step_KB: Tensor,
        rows: slice,
        reference: Sequence[Tensor | None],
        position: float,
    ) -> Window:
        """The window over ``rows`` of all trained steps."""
        tr = micro.trajectory
        share = 1.0 / len(step_KB)
        t_WB = tr.t_S[step_KB[rows]]
        step, t = step_KB[rows].to(policy.device), t_WB.to(policy.device)

        def velocities(js: Sequence[int]) -> list[Tensor]:
            zs = [take_steps(tr.recorded["states"], step[j]) for j in js]
            return policy.velocities(zs, [t[j] for j in js], tr.condition)

        return Window(
            t_WB=t_WB,
            position=position,
            velocities=velocities,
            loss=lambda j, raw: self._loss(micro, policy, step[j], raw, reference[j], share),
            stored=lambda j: take_steps(tr.recorded["velocities"], step[j]),
            fresh=tr.fresh(policy.version, step_KB[rows].flatten().tolist()),
        )

    def _transition(self, micro: Batch, step_B: Tensor, v: Tensor) -> Transition:
        """The kernel at each sample's step."""
        tr = micro.trajectory
        sigma_S = tr.sigma_S.to(v.device)
        return self.kernel(v, take_steps(tr.recorded["states"], step_B), sigma_S[step_B], sigma_S[step_B + 1])

    def _loss(
        self, micro: Batch, policy: Policy, step_B: Tensor, raw: Tensor, v_ref: Tensor | None, share: float
    ) -> StepLoss:
        """``weight * (clipped policy loss + kl_coef * KL) / trained steps``, summed over the micro-batch."""
        tr = micro.trajectory
        v = policy.model.guide(raw)
        transition = self._transition(micro, step_B, v)
        z_next = take_steps(tr.recorded["states"], step_B + 1)
        log_ratio = transition.log_prob(z_next) - take_steps(tr.recorded["log_prob"], step_B)
        if self.guard:
            mean_old = take_steps(tr.recorded["mean"], step_B)
            log_ratio = guarded_log_ratio(log_ratio, transition.mean, mean_old, transition.std)
        ratio, advantage = log_ratio.exp(), micro.credit["advantage"]
        policy_B = clipped_loss(ratio, advantage, self.clip_range)
        if self.guard_reweight:
            sigma_S = tr.sigma_S.to(v.device)
            policy_B = policy_B / (sigma_S[step_B] - sigma_S[step_B + 1])
        loss_B = policy_B
        stats = ratio_stats(ratio.detach(), advantage, policy_B.detach(), self.clip_range)
        if tr.predicted and policy.version == tr.version:
            stats |= cache_stats(log_ratio.detach())
        if v_ref is not None:
            kl_B = self._kl(micro, step_B, transition, v, v_ref)
            loss_B = loss_B + self.kl_coef * kl_B
            stats["kl"] = kl_B.detach().mean()
        return StepLoss((micro.weight_B * loss_B).sum() * share, stats)

    def _kl(self, micro: Batch, step_B: Tensor, transition: Transition, v: Tensor, v_ref: Tensor) -> Tensor:
        """KL to the reference per sample (B,), in the chosen form."""
        if self.kl_form == "velocity":
            return mean_d((v - v_ref) ** 2)
        mean_ref = self._transition(micro, step_B, v_ref).mean
        return mean_d((transition.mean - mean_ref) ** 2) / (2 * transition.g**2)
