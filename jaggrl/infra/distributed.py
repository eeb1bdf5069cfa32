"""Ranks, collectives and sharding: plain ``python -m``, ``torchrun`` on CPU (gloo) and on GPU (nccl) alike."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from jaggrl.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process writes and talks."""
        return self.rank == 0


def start(device: str = "auto", timeout_s: float = 1800) -> Ranks:
    """Join the process group that torchrun describes in the environment, or stay alone.

    Raises UserError where several tasks of a SLURM step would each train alone, or for a device that is not there.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"srun started {tasks} tasks that know nothing of each other; start one per node, and torchrun in it: "
            "srun --ntasks-per-node=1 torchrun --nnodes=... --nproc_per_node=... -m jaggrl.train ..."
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"distributed.device={device} is unknown; use auto, cpu or cuda")
    use_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if use_cuda and not torch.cuda.is_available():
        raise UserError("distributed.device=cuda but torch sees no GPU; use distributed.device=cpu or auto")
    here = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {rank} has no GPU: {torch.cuda.device_count()} are here; lower --nproc_per_node to that"
        )
    if use_cuda:
        torch.cuda.set_device(here)
    elif world > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world))))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    return Ranks(rank, world, here)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined(device: str = "auto", timeout_s: float = 1800) -> Iterator[Ranks]:
    """``start`` and ``stop`` around a task; a UserError inside learns whose it is."""
    try:
        yield start(device, timeout_s)
    except UserError as error:
        error.rank = int(os.environ.get("RANK", "0"))
        raise
    finally:
        stop()


def rank() -> int:
    """This process's rank, 0 when it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(x_B: Tensor) -> Tensor:
    """Concatenate (B, ...) over ranks in rank order; every rank has the same B. -> (world * B, ...)."""
    if not dist.is_initialized():
        return x_B
    parts = [torch.empty_like(x_B) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x_B.contiguous())
    return torch.cat(parts)


def total(x: Tensor) -> Tensor:
    """Sum over ranks."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
    return x


def largest(x: Tensor) -> Tensor:
    """Maximum over ranks."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def union(values: Iterable[Any]) -> set[Any]:
    """The different python values that any rank has, on every rank."""
    mine = set(values)
    if not dist.is_initialized():
        return mine
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return set().union(*everywhere)


def broadcast(value: Any) -> Any:
    """Rank 0's python object on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def shard(
    network: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks, precision: str, replicas: int = 1
) -> None:
    """FSDP2 in place: each block a unit, the rest of the network the root unit.

    The root does not reshard after its forward (FSDP2's default), so that it is gathered once per forward-backward;
    blocks do. Gradients are averaged over ranks in fp32.

    Args:
        network: moved to the device; trainable parameters are fp32.
        blocks: units, in order of execution.
        ranks: this process.
        precision: ``fp32``, or ``bf16`` for bf16 gathers and compute.
        replicas: HSDP: this many replicas of a sharded group (1 = shard over all ranks).
    """
    if ranks.world % replicas:
        raise UserError(f"distributed.replicas={replicas} does not divide {ranks.world} ranks")
    if replicas > 1:
        shape, names = (replicas, ranks.world // replicas), ("replicate", "shard")
        mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    else:
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    kwargs: dict[str, Any] = {"mesh": mesh}
    if precision == "bf16":
        kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in blocks:
        fully_shard(block, **kwargs)
    fully_shard(network, **kwargs)
