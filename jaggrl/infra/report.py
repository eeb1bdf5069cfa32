"""What a run achieved: gains on held-out prompts with intervals, as a table and as ``result.json``."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from jaggrl.infra.environment import code_hash, git_commit, versions
from jaggrl.infra.files import write_json
from jaggrl.infra.logging import plain
from jaggrl.infra.table import table

RESULT = "result.json"
RESAMPLES = 10_000
CHUNK = 1 << 22  # drawn indices at a time: 32 MB, whatever the number of prompts


@dataclass(frozen=True)
class Gain:
    """One reward on held-out prompts, before and after training; raw values, 95 % interval of the gain."""

    name: str
    trained: bool
    before: float
    after: float
    gain: float
    ci_low: float
    ci_high: float
    n: int


def student(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of Student's 95 % interval; infinite from one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, half


def paired_bootstrap(
    before_N: npt.ArrayLike, after_N: npt.ArrayLike, seed: int = 0
) -> tuple[float, float, float]:
    """Mean gain and the percentile bootstrap's 95 % interval over prompts, paired (same prompt, same noise).

    ``gain = mean_i d_i`` with ``d_i = after_i - before_i``; the interval ends at the 2.5 and 97.5 %
    quantiles of the mean over resampled prompts.

    Args:
        before_N: (N,) scores, all finite.
        after_N: (N,) scores of the same prompts.
        seed: of the resampling.

    Returns:
        gain, lower end, upper end; NaN when N is 0.
    """
    difference_N = np.asarray(after_N, np.float64) - np.asarray(before_N, np.float64)
    count = len(difference_N)
    if count == 0:
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(seed)
    rows = max(1, CHUNK // count)
    means = np.concatenate(
        [
            difference_N[rng.integers(count, size=(min(rows, RESAMPLES - done), count))].mean(axis=1)
            for done in range(0, RESAMPLES, rows)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return float(difference_N.mean()), float(low), float(high)


def compare(
    before: Mapping[str, npt.ArrayLike],
    after: Mapping[str, npt.ArrayLike],
    trained: Collection[str],
    seed: int = 0,
) -> list[Gain]:
    """Gains of every reward, trained ones first; a prompt that either side could not score (NaN) is left out.

    Args:
        before: reward name -> (N,) scores in prompt order.
        after: the same prompts with the same noise after training.
        trained: names of the rewards that were trained on.
        seed: of the bootstrap.
    """
    gains = []
    for name in sorted(before, key=lambda name: (name not in trained, name)):
        old_N, new_N = np.asarray(before[name], np.float64), np.asarray(after[name], np.float64)
        scored_N = np.isfinite(old_N) & np.isfinite(new_N)
        old_N, new_N = old_N[scored_N], new_N[scored_N]
        gain, low, high = paired_bootstrap(old_N, new_N, seed)
        was, now = (float(x.mean()) if len(x) else math.nan for x in (old_N, new_N))
        gains.append(Gain(name, name in trained, was, now, gain, low, high, len(old_N)))
    return gains


def gains_table(gains: Sequence[Gain]) -> str:
    """The final table: before, after, gain, interval, n, and which rewards were trained on."""
    rows = [
        (
            g.name,
            f"{g.before:.4f}",
            f"{g.after:.4f}",
            f"{g.gain:+.4f}",
            f"[{g.ci_low:+.4f}, {g.ci_high:+.4f}]",
            g.n,
            "trained" if g.trained else "",
        )
        for g in gains
    ]
    return table(["reward", "before", "after", "gain", "95 % interval", "n", ""], rows)


def stage_seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds per stage from the lines of ``metrics.jsonl``: total, and mean per step without the first step.

    The first step warms up (allocation, compilation), so it counts in the mean only while it is alone.
    """
    steps = [row for row in rows if "time/step_s" in row]
    stages = dict.fromkeys(key for row in steps for key in row if key.startswith("time/"))
    seconds = {}
    for key in stages:
        values = [float(row.get(key) or 0.0) for row in steps]
        steady = values[1:] or values
        name = key.removeprefix("time/").removesuffix("_s")
        seconds[name] = {"total": sum(values), "per_step": sum(steady) / len(steady)}
    return seconds


def write_result(folder: Path, gains: Sequence[Gain], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``result.json``: gains by reward, ``facts`` (updates, cost, seconds, seed, hash) and versions."""
    rewards = {}
    for gain in gains:
        fields = {key: plain(value) for key, value in asdict(gain).items()}
        rewards[fields.pop("name")] = fields
    content = {
        "rewards": rewards,
        **facts,
        "versions": versions(),
        "git": git_commit(),
        "code_hash": code_hash(),
    }
    write_json(folder / RESULT, content)
    return content
