"""The seed rule: noise depends on (run seed, rollout, prompt slot, member, stream), not on rank or batch."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by a 63-bit hash of the key."""
    digest = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def normal(generators: Sequence[torch.Generator], shape: Sequence[int], device: torch.device) -> Tensor:
    """One standard normal latent per generator, (B, *shape) fp32."""
    return torch.stack([torch.randn(tuple(shape), generator=g) for g in generators]).to(device)
