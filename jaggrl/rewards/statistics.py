"""What the log wants to know of a rollout's rewards."""

from torch import Tensor

from jaggrl.trajectory import Scored


def reward_metrics(scored: Scored) -> dict[str, float]:
    """Per reward: mean, std, mean within-group std, failures; and each reward's share of the total's spread."""
    metrics: dict[str, float] = {}
    spreads: dict[str, float] = {}
    for name, value_N in scored.parts_N.items():
        stats, spreads[name] = _moments(value_N, scored.group_size)
        metrics |= {f"reward/{name}/{k}": v for k, v in stats.items()}
        spreads[name] *= abs(scored.weights[name])
    everything = sum(spreads.values())
    metrics |= {f"reward/{name}/share": s / everything for name, s in spreads.items() if everything > 0}
    stats, _ = _moments(scored.total_N, scored.group_size)
    groups = scored.total_N.view(-1, scored.group_size)
    metrics |= {f"reward/total/{k}": v for k, v in stats.items()}
    metrics["reward/zero_std_groups"] = float((groups == groups[:, :1]).all(1).sum())
    return metrics


def _moments(value_N: Tensor, group: int) -> tuple[dict[str, float], float]:
    """Masked mean and std of a reward, its mean within-group std, and the count of failed scores."""
    valid = value_N.isfinite()
    good = value_N[valid]
    per_group = [g[g.isfinite()] for g in value_N.view(-1, group)]
    within = [float(g.std()) for g in per_group if len(g) > 1]
    group_std = sum(within) / max(1, len(within))
    stats = {
        "mean": float(good.mean()) if len(good) else float("nan"),
        "std": float(good.std()) if len(good) > 1 else 0.0,
        "group_std": group_std,
        "failed": float((~valid).sum()),
    }
    return stats, group_std
