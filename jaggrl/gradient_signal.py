"""How much of a mini-batch gradient is signal: its cosine to the true gradient, estimated without knowing that."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggrl.infra.distributed import total


@dataclass(frozen=True)
class Signal:
    """How much of a mini-batch gradient is signal; nan where the noise of all rollouts together hides it."""

    cosine: float
    """To the true (many-rollout) exact gradient."""
    snr: float
    """``cosine^2 / (1 - cosine^2)``: rollouts needed for a given quality go with its inverse."""
    jackknife: tuple[float, ...] = ()
    """``snr`` with each rollout left out in turn."""


def signal(estimates_RM: Tensor, exact_RM: Tensor) -> Signal:
    """Unbiased over pairs of different rollouts: ``<g^r, e^q>`` estimates ``<E g, e*>``, ``<e^r, e^q>`` ``|e*|^2``."""
    if len(exact_RM) < 3:
        return Signal(math.nan, math.nan)
    cross = total(estimates_RM.double() @ exact_RM.double().T)
    own = total(exact_RM.double() @ exact_RM.double().T)
    norms = total(estimates_RM.double().square().sum(1))
    everything = torch.arange(len(norms))
    jackknife = [_snr(cross, own, norms, everything[everything != r]) for r in everything]
    cosine, snr = _snr(cross, own, norms, everything)
    return Signal(cosine, snr, tuple(s for _, s in jackknife))


def _snr(cross: Tensor, own: Tensor, norms: Tensor, keep: Tensor) -> tuple[float, float]:
    pairs = len(keep) * (len(keep) - 1)
    cross, own = cross[keep][:, keep], own[keep][:, keep]
    along = float((cross.sum() - cross.trace()) / pairs)
    true = float((own.sum() - own.trace()) / pairs)
    if true <= 0 or along <= 0:
        return math.nan, math.nan
    cosine = along / math.sqrt(true * float(norms[keep].mean()))
    return cosine, cosine**2 / (1 - cosine**2) if cosine < 1 else math.nan
