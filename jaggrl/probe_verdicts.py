"""Verdicts of a probe: paired comparisons of JAGG with every strategy that costs no more."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaggrl.infra.report import student

SAME = 1.01  # costs within 1 % count as equal


@dataclass(frozen=True)
class Difference:
    """Mean difference of two strategies' cosines to exact, paired by rollout, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(ours: Sequence[float], theirs: Sequence[float]) -> "Difference":
        """Student's interval over the rollouts in which both have a gradient; no interval from one."""
        pairs = [a - b for a, b in zip(ours, theirs, strict=True) if math.isfinite(a) and math.isfinite(b)]
        mean, half = student(pairs) if pairs else (math.nan, math.inf)
        return Difference(mean, mean - half, mean + half)

    def __str__(self) -> str:
        """``+0.012 [+0.008, +0.016]``."""
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def verdicts(
    cosines: Mapping[str, Sequence[float]],
    costs: Mapping[str, float],
    linear: Sequence[str],
    same_rule: Callable[[str, str], bool],
) -> list[str]:
    """One line per question, whatever the answer.

    Args:
        cosines: strategy -> cosine of the whole update to exact, by rollout.
        costs: strategy -> forward-equivalents of the update per sample.
        linear: the strategies that are JAGG, at their window lengths.
        same_rule: whether two strategies cut the same windows and pull back as many steps of each.
    """
    lines = []
    for name in linear:
        for rival in cosines:
            if rival not in (name, "exact") and same_rule(name, rival):
                found = Difference.of(cosines[name], cosines[rival])
                word = "beats" if found.low > 0 else "loses to" if found.high < 0 else "is level with"
                lines.append(f"{name} {word} {rival} (as many backwards): cosine {found}")
        better = {
            rival: found
            for rival in cosines
            if rival not in (name, "exact") and costs[rival] <= SAME * costs[name]
            for found in [Difference.of(cosines[rival], cosines[name])]
            if found.low > 0
        }
        told = ", ".join(
            f"{rival} ({costs[rival]:.4g} against {costs[name]:.4g}) {found}"
            for rival, found in better.items()
        )
        lines.append(f"dominating {name} (higher cosine at no more cost): {told or 'none'}")
    return lines
