"""Run under torchrun (or plainly): train a small policy and save every update's gradients and weights.

usage: ranks_script.py OUT MODEL ALGORITHM STRATEGY
"""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from jaggrl.infra.distributed import shard, start, stop
from jaggrl.models.policy import Lora, Policy, make_trainable
from tests.distributed.setups import algorithm_and_sampler, backward_settings, small_model
from tests.toys import toy_trainer


def full(x: torch.Tensor) -> torch.Tensor:
    """The whole tensor, whatever its sharding."""
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.detach().clone()


def main(out: Path, model_name: str, algorithm_name: str, strategy: str) -> None:
    """Two rollouts of two SGD updates."""
    ranks = start("cpu")
    model = small_model(model_name)
    lora = Lora(4, 8) if model_name.endswith("lora") else None
    torch.manual_seed(0)
    make_trainable(model, lora, checkpointing=False)
    if ranks.world > 1:
        shard(model.network, model.blocks(), ranks, "fp32")
    policy = Policy(model, lora, "fp32", ranks.device)
    algorithm, sampler = algorithm_and_sampler(algorithm_name)
    interpolant, settings = backward_settings(strategy)
    # FLUX's gradients here are small: a rate that lifts the changes above the rounding of weights near 1
    trainer = toy_trainer(
        algorithm, sampler, interpolant, settings, policy=policy, ranks=ranks, micro_batch=3, updates_per_rollout=2,
        lr=1e-2 if model_name == "toy" else 0.3,
        prompt_texts=["a red circle on a white background", "two blue squares on a gray background", "a"],
    )  # fmt: skip
    begin = [full(p) for p in policy.parameters]
    gradients, norms = [], []
    optimize = trainer.optimize

    def spy() -> float:
        gradients.append([full(p.grad) for p in policy.parameters])
        norms.append(optimize())
        return norms[-1]

    trainer.optimize = spy  # type: ignore[method-assign]
    metrics = [trainer.step() for _ in range(2)]
    changes = [full(p) - b for p, b in zip(policy.parameters, begin, strict=True)]
    if ranks.main:
        torch.save({"gradients": gradients, "norms": norms, "changes": changes, "metrics": metrics}, out)
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
