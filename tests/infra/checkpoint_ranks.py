"""Run by test_checkpoint.py: two ranks train under FSDP2 and save; one process loads and goes on alike.

Two ranks see the halves of a batch of which one process sees the whole, so the weights must agree.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from jaggrl.infra.checkpoint import Checkpoints


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if dist.is_initialized():
        fully_shard(network[0])
        fully_shard(network)
    return network, torch.optim.AdamW(network.parameters(), lr=0.1)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        network(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gathered(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(network, optimizer)
    return {"model": model, "optimizer": optim, "step": 0}


def save(folder: Path) -> None:
    dist.init_process_group("gloo")
    network, optimizer = build()
    train(network, optimizer, range(3))
    state = gathered(network, optimizer) | {"step": 3}
    checkpoints = Checkpoints(folder)
    checkpoints.check_space(state)
    path = checkpoints.save(3, state)
    checkpoints.load(path, gathered(*build()))
    assert checkpoints.latest() == path
    dist.destroy_process_group()


def load(folder: Path) -> None:
    network, optimizer = build()
    checkpoints = Checkpoints(folder)
    path = checkpoints.latest()
    assert path is not None
    state = gathered(network, optimizer)
    checkpoints.load(path, state)
    assert state["step"] == 3
    set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(network, optimizer, range(3, 5))

    alone, its_optimizer = build()
    train(alone, its_optimizer, range(5))
    for ours, theirs in zip(network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    print("same weights, same optimizer, same next step")


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
