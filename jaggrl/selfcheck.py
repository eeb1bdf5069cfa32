"""The first rollout's self-check: what usually is wrong when a reward does not rise, in one table."""

import hashlib
from dataclasses import dataclass

from jaggrl.infra.distributed import union
from jaggrl.trainer import Trainer
from jaggrl.trajectory import Trajectory


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    value: str
    good: bool
    meaning: str


def findings(trainer: Trainer, metrics: dict[str, float]) -> list[Finding]:
    """Look at the first step: ratio, reward spread, distinct pictures, updates per rollout. All ranks find the same."""
    scored = trainer.first
    assert scored is not None
    found = []
    deviation = trainer.first_ratio_deviation
    if deviation is not None:
        found.append(_ratio(trainer, scored.trajectory, deviation))
    groups = scored.total_N.view(-1, scored.group_size)
    flat = int((groups == groups[:, :1]).all(1).sum())
    found.append(
        Finding(
            "reward spread within groups",
            f"{metrics['reward/total/group_std']:.2e} ({flat} of {len(groups)} groups all equal)",
            flat < len(groups),
            "groups disagree: there is something to learn"
            if flat < len(groups)
            else "every group is flat: no credit",
        )
    )
    failed = int(metrics["reward/total/failed"])
    found.append(
        Finding("failed scores", f"{failed} of {groups.numel()}", failed == 0, "masked out of the update")
    )
    media = scored.trajectory.media_B.flatten(1)
    pictures = (media * 255).round().byte().cpu().numpy()
    distinct = len(union(hashlib.sha256(row.tobytes()).digest() for row in pictures))
    found.append(
        Finding(
            "distinct pictures",
            f"{distinct} of {groups.numel()}",
            distinct == groups.numel(),
            "exploration works"
            if distinct == groups.numel()
            else "samples repeat: shared noise without exploration?",
        )
    )
    updates = trainer.loop.updates_per_rollout
    meaning = "the ratio leaves 1 from the second update on"
    if updates == 1:
        meaning = (
            "the ratio stays 1 and the clip idle by construction: watch reward and grad norm, not the loss"
        )
    found.append(Finding("updates per rollout", str(updates), True, meaning))
    cut = len(union(trainer.policy.model.truncated))
    found.append(
        Finding(
            "prompts cut by a text encoder",
            str(cut),
            cut == 0,
            "the model never sees their ends" if cut else "",
        )
    )
    return found


def _ratio(trainer: Trainer, trajectory: Trajectory, deviation: float) -> Finding:
    """Rollout and replay must agree, unless a feature cache made the rollout."""
    limit = 1e-6 if trainer.policy.precision == "fp32" else min(1e-3, trainer.algorithm.clip_range)
    good, meaning = deviation <= limit, "rollout and replay see the same network"
    if trajectory.predicted:
        good, meaning = True, "the rollout's feature cache is another policy: see train/cache_*"
    elif not good:
        meaning = "rollout and replay differ: guidance, precision or dropout"
    return Finding("max |ratio - 1| before the first update", f"{deviation:.1e}", good, meaning)


def table(found: list[Finding]) -> str:
    """The findings as aligned lines."""
    width = max(len(f.name) for f in found)
    value = max(len(f.value) for f in found)
    lines = [
        f"  {'ok  ' if f.good else 'LOOK'} {f.name:<{width}}  {f.value:<{value}}  {f.meaning}" for f in found
    ]
    return "\n".join(["self-check of the first rollout:", *lines])
