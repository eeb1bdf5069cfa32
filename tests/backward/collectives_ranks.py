"""Run under torchrun by test_collectives.py: FSDP2's collectives per graph mode, and gradients against one
process.

Every rank holds half of a batch; the reference gradient is that of the whole batch in one unsharded process.
Rank 0 writes JSON: case -> all-gathers and reduce-scatters per window, and the largest relative error.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from jaggrl.backward.interpolants import Exact, Linear
from jaggrl.backward.sharded import counted_collectives
from jaggrl.backward.strategy import Backward
from jaggrl.infra.distributed import shard, start, stop
from jaggrl.infra.stopwatch import Stopwatch
from jaggrl.window import StepLoss, Window

W, B = 4, 4
CPU = torch.device("cpu")
CASES = (("joint", False), ("joint", True), ("batched", True), ("sequential", True), ("exact", True))
FLUX = {
    "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim":
    8, "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4),
}  # fmt: skip


class Blocks(nn.Module):
    """Four residual blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        x = self.entry(torch.cat([z, t[:, None, None].expand(-1, z.shape[1], 1)], -1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def toy(checkpointing: bool) -> tuple[nn.Module, list[nn.Module], Callable[..., Tensor]]:
    network = Blocks()
    if checkpointing:
        for i, block in enumerate(network.blocks):
            network.blocks[i] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
    return network, list(network.blocks), network


def flux(checkpointing: bool) -> tuple[nn.Module, list[nn.Module], Callable[..., Tensor]]:
    network = FluxTransformer2DModel(**FLUX)
    if checkpointing:
        network.enable_gradient_checkpointing()

    def velocity(z: Tensor, t: Tensor) -> Tensor:
        text, pooled = torch.ones(len(z), 3, 8), torch.ones(len(z), 8)
        ids, text_ids = torch.arange(12.0).view(4, 3), torch.zeros(3, 3)
        return network(
            hidden_states=z, timestep=t, encoder_hidden_states=text, pooled_projections=pooled, img_ids=ids,
            txt_ids=text_ids, return_dict=False,
        )[0]  # fmt: skip

    return network, [*network.transformer_blocks, *network.single_transformer_blocks], velocity


def window(velocity: Callable[..., Tensor], rows: slice, share: float) -> Window:
    """Squared errors on rows of a fixed batch."""
    g = torch.Generator().manual_seed(1)
    z_WB, target_WB = torch.randn(2, W, B, 4, 4, generator=g)[:, :, rows]
    t_WB = torch.tensor([0.9, 0.7, 0.4, 0.3]).unsqueeze(1).expand(W, z_WB.shape[1])

    def velocities(js: Any) -> list[Tensor]:
        return list(
            velocity(torch.cat([z_WB[j] for j in js]), torch.cat([t_WB[j] for j in js])).chunk(len(js))
        )

    def loss(j: int, v: Tensor) -> StepLoss:
        return StepLoss(share * (1 + j) * ((v - target_WB[j]) ** 2).mean())

    return Window(t_WB, 0.0, velocities, loss)


def strategy(graph: str, network: nn.Module, toggle: bool = True) -> Backward:
    backward = Backward(Exact() if graph == "exact" else Linear(), W, "joint" if graph == "exact" else graph)
    backward.attach(network, Stopwatch(CPU))
    if not toggle:
        backward._joint_call = nullcontext
    return backward


def backward_gathers(backward: Backward, window: Window) -> dict[str, int]:
    """Collectives of one window: all, and those issued after its last forward."""
    with counted_collectives() as counts:
        seen = {}

        def velocities(js: Any) -> list[Tensor]:
            out = window.velocities(js)
            seen["forward"] = counts["all_gathers"]
            return out

        backward(Window(window.t_WB, window.position, velocities, window.loss))
    return {
        "gathers": counts["all_gathers"],
        "gathers_after_forwards": counts["all_gathers"] - seen["forward"],
        "scatters": counts["reduce_scatters"],
    }


def main(out: Path) -> None:
    ranks = start("cpu")
    results: dict[str, dict[str, float]] = {}
    for name, make in (("toy", toy), ("flux", flux)):
        for checkpointing in (False, True):
            torch.manual_seed(0)
            network, _, velocity = make(checkpointing)
            # two windows: gradients accumulate
            expected = {}
            for graph in ("exact", "joint"):
                for _ in range(2):
                    strategy(graph, network)(window(velocity, slice(0, B), 1.0))
                expected[graph] = [p.grad.clone() for p in network.parameters() if p.grad is not None]
                network.zero_grad()
            torch.manual_seed(0)
            network, blocks, velocity = make(checkpointing)
            shard(network, blocks, ranks, "fp32")
            mine = slice(ranks.rank * B // 2, (ranks.rank + 1) * B // 2)
            for graph, toggle in CASES:
                backward = strategy(graph, network, toggle)
                counts = [backward_gathers(backward, window(velocity, mine, 1.0)) for _ in range(2)][-1]
                got = [p.grad.full_tensor() for p in network.parameters() if p.grad is not None]
                network.zero_grad()
                pairs = zip(got, expected["exact" if graph == "exact" else "joint"], strict=True)
                error = max(float((g - w).abs().max() / w.abs().max().clamp(min=1e-3)) for g, w in pairs)
                label = graph if toggle else f"{graph}_default"
                results[f"{name}{'_checkpointing' if checkpointing else ''}/{label}"] = counts | {
                    "error": error
                }
    if ranks.main:
        out.write_text(json.dumps(results, indent=1))
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
