"""DiffusionART (arXiv 2610.12572): one shared direction per prompt, regressed to on the rollout's own states.

The method's code is not public; this follows the published descriptions. What they say, we do: ODE rollout with
the current policy and cached velocities ``v0``; ``G(c) = C / RMS(C)`` with ``C = Cov(R, x0 | c)``,
normalised once, after aggregation; target ``v0`` plus the direction on every state; two disjoint
minibatches per rollout, one update each; in the second the target pulls back what has drifted; no EMA, no
beta, no KL, no gradient of the reward. Where we choose:

1. Sign. The paper adds G to a velocity that points from noise to data. Ours is ``v = eps - x0``, ``x0^ = x
   - sigma v``, so that moving x0^ towards C takes ``v_tgt = v0 - C / RMS(C)``. Credit ``direction`` is that
   ``G_v = -C / RMS(C)``.
2. The covariance is ``1/K sum_i (R_i - mean R) x0_i`` over the valid samples of a prompt, which may lie on
   several ranks: every rank sums its own and the sums are added up. A prompt whose rewards are all equal
   weighs nothing.
3. Every group is split within itself over the two updates (the same prompts in both).
4. Trained states are all of the rollout but the last one (NFT's N - 1).
5. The proxy KL ``m`` is that of Flow-GRPO's surrogate transition: ``mean_d(kappa d)^2 / (2 std^2)``, a mean
   over dimensions, because a sum would mask everything at delta = 1e-5. A masked state loses its loss and
   keeps its place in the mean.
6. The loss per state is ``w mean_d (v - v_tgt)^2`` with w = 1 (options ``sigma``, ``sigma2``).
7. Several rewards: ``mix=reward`` sums weighted raw values, ``mix=advantage`` divides each by its std over
   the rollout first. With one reward, scale and offset cancel.
8. Pairwise: neighbours (0, 1), (2, 3), ... of a group are the pairs; its members are exchangeable, so that
   they are random pairs. The winner counts +1, the loser -1; a tie or a failed score drops the pair. For K
   = 2 it is the scalar form.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jaggrl.algorithms.base import Algorithm, batch_of, log
from jaggrl.credit import preference, standardised_total
from jaggrl.diffusion.grouping import Group, eligible
from jaggrl.diffusion.kernels import Kernel, mean_d, over_latent
from jaggrl.errors import UserError, unknown
from jaggrl.infra.distributed import total
from jaggrl.models.policy import Policy
from jaggrl.trajectory import Batch, Scored, Trajectory
from jaggrl.window import StepLoss, Window

WEIGHTS = {"one": 0, "sigma": 1, "sigma2": 2}
"""Power of sigma that weighs a state's loss."""


class DiffusionART(Algorithm):
    """``w mean_d (v - v0 - G_v)^2`` on rollout states, masked where the second update would drift."""

    record = frozenset({"states", "velocities"})
    regresses = True

    def __init__(
        self,
        surrogate: Kernel,
        mask_threshold: float = 1e-5,
        pairwise: bool = False,
        mix: str = "reward",
        weight: str = "one",
        timestep_fraction: float = 1.0,
    ) -> None:
        """
        Args:
            surrogate: the stochastic transition whose means measure the drift (the rollout itself has no
                noise).
            mask_threshold: delta of the proxy KL.
            pairwise: labels of random pairs instead of scores.
            mix: several rewards as weighted raw values (``reward``) or each standardised first
                (``advantage``).
            weight: w of a state's loss: ``one``, ``sigma`` or ``sigma2``.
            timestep_fraction: share of the states but the last that are trained, the noisiest first.
        """
        if weight not in WEIGHTS:
            raise unknown("algorithm.weight", weight, WEIGHTS)
        if mix not in ("reward", "advantage"):
            raise unknown("algorithm.mix", mix, ("reward", "advantage"))
        if not mask_threshold > 0:
            raise UserError(f"algorithm.mask_threshold={mask_threshold} must be > 0; the paper uses 1e-5")
        eligible(1000, timestep_fraction)
        self.surrogate = surrogate
        self.mask_threshold = mask_threshold
        self.pairwise = pairwise
        self.mix = mix
        self.weight = weight
        self.timestep_fraction = timestep_fraction

    def check(self, interpolates: bool, init_noise: str, explores: bool, updates: int, group: int) -> None:
        """Also refuses stochastic rollouts, shared noise, and groups that make no updates or pairs."""
        super().check(interpolates, init_noise, explores, updates, group)
        self._check_ode(init_noise, explores)
        if self.pairwise and group % 2:
            raise UserError(
                f"group_size={group} does not make pairs; use an even one with algorithm.pairwise=true"
            )
        if group % updates:
            raise UserError(
                f"group_size={group} does not split evenly over updates_per_rollout={updates}; "
                f"use group_size={-(-group // updates) * updates}"
            )
        if updates != 2:
            log.warning(
                "DiffusionART is two updates per rollout, the second restores; updates_per_rollout=%d %s",
                updates,
                "has none that restores" if updates == 1 else "restores more than once",
            )

    def credit(self, scored: Scored) -> Batch:
        """``G_v`` of each sample's prompt; prompts without a direction weigh nothing."""
        group = scored.group_size
        if self.mix == "reward":
            reward_N = scored.total_N
        else:
            reward_N = standardised_total(scored.parts_N, scored.weights)
        share_N = preference(reward_N, group, self.pairwise)
        direction_P, found_P = shared_direction(scored.trajectory, share_N, group)
        prompt_B = torch.tensor(
            [s.prompt_index for s in scored.trajectory.samples], device=direction_P.device
        )
        found_N = found_P.cpu().repeat_interleave(group)
        stats = {"train/zero_cov_frac": 1 - float(found_P.float().mean())}
        return batch_of(scored, {}, {"direction": direction_P[prompt_B]}, kept_N=found_N, stats=stats)

    def trained_steps(self, trajectory: Trajectory) -> list[int]:
        """All states but the last, or the noisiest share of them."""
        return list(range(eligible(len(trajectory.noisy_S) - 1, self.timestep_fraction)))

    def windows(self, micro: Batch, policy: Policy, groups: Sequence[Group]) -> Iterator[Window]:
        """One window per group; states are the rollout's own: the first update can be served."""
        tr = micro.trajectory
        trained = sum(len(g.steps) for g in groups)
        t_SB = tr.t_S.unsqueeze(1).expand(-1, len(tr.samples))
        for group in groups:
            steps = list(group.steps)

            def velocities(js: Sequence[int], steps: list[int] = steps) -> list[Tensor]:
                ts = [t_SB[steps[j]].to(policy.device) for j in js]
                return policy.velocities([tr.recorded["states"][steps[j]] for j in js], ts, tr.condition)

            def loss(j: int, raw: Tensor, steps: list[int] = steps) -> StepLoss:
                return self._loss(micro, policy, steps[j], raw, 1.0 / trained)

            def stored(j: int, steps: list[int] = steps) -> Tensor:
                return tr.recorded["velocities"][steps[j]]

            fresh = policy.version == tr.version
            yield Window(t_SB[steps], group.position, velocities, loss, stored, fresh)

    def _loss(self, micro: Batch, policy: Policy, i: int, raw: Tensor, share: float) -> StepLoss:
        """``w mean_d (v - v0 - G_v)^2`` where not masked; its gradient in v is ``(2w/D)(d - G_v)``."""
        tr = micro.trajectory
        v = policy.model.guide(raw).float()
        d = v - policy.model.guide(tr.recorded["velocities"][i]).float()
        direction = micro.credit["direction"]
        sigma_B, next_B = (tr.sigma_S[k].to(v.device).expand(len(v)) for k in (i, i + 1))
        kappa_B, std_B = self.surrogate.kappa(sigma_B, next_B), self.surrogate.std(sigma_B, next_B)
        drift_B = proxy_kl(d.detach(), kappa_B, std_B)
        masked_B = masked(d.detach(), direction, drift_B, self.mask_threshold)
        loss_B = sigma_B ** WEIGHTS[self.weight] * mean_d((d - direction) ** 2)
        loss_B = torch.where(masked_B, 0.0, loss_B)
        stats = {
            "policy_loss": loss_B.detach().mean(),
            "proxy_kl": drift_B.mean(),
            "mask_frac": masked_B.float().mean(),
            "drift": mean_d(d.detach() ** 2).mean().sqrt(),
        }
        return StepLoss((micro.weight_B * loss_B).sum() * share, stats)


def shared_direction(trajectory: Trajectory, share_N: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """``G_v = -C / RMS(C)`` per prompt (P, ...), ``C = sum_i share_i x0_i``, and where it exists (P,).

    Args:
        trajectory: this rank's samples.
        share_N: each sample's share of its prompt's covariance, over all ranks; sums to 0 within a group.
        group: samples per prompt.
    """
    x0_B = trajectory.x0_B
    prompts = len(share_N) // group
    index_B = torch.tensor([s.index for s in trajectory.samples])
    share_B = share_N[index_B].to(x0_B)
    prompt_B = (index_B // group).to(x0_B.device)
    covariance_P = torch.zeros(prompts, *x0_B.shape[1:], device=x0_B.device)
    covariance_P.index_add_(0, prompt_B, over_latent(share_B, x0_B) * x0_B)
    covariance_P = total(covariance_P)
    rms_P = mean_d(covariance_P**2).sqrt()
    scale_P = share_N.view(prompts, group).abs().sum(1).to(x0_B)
    found_P = rms_P > 1e-8 * scale_P
    direction_P = -covariance_P / over_latent(torch.where(found_P, rms_P, 1.0), covariance_P)
    return torch.where(over_latent(found_P, covariance_P), direction_P, 0.0), found_P


def proxy_kl(d: Tensor, kappa_B: Tensor, std_B: Tensor) -> Tensor:
    """``m = mean_d (kappa d)^2 / (2 std^2)`` (B,): KL of surrogate transitions that differ by d in v."""
    return kappa_B**2 * mean_d(d**2) / (2 * std_B**2)


def masked(d: Tensor, direction: Tensor, drift_B: Tensor, threshold: float) -> Tensor:
    """States to leave alone (B,): far out, ``m >= delta``, and going on outward, ``<d, G_v - d> > 0``."""
    return (drift_B >= threshold) & (mean_d(d * (direction - d)) > 0)
