"""Training state for the checkpoint, and exports that diffusers loads. All functions are collective."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from jaggrl.models.policy import Policy

TRAINABLE = StateDictOptions(ignore_frozen_params=True)


def training_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Trainable weights and optimizer state, sharded as they are (only LoRA's tensors under LoRA)."""
    fresh = not optimizer.state
    model, optim = get_state_dict(policy.model.network, optimizer, options=TRAINABLE)
    if fresh:  # torch has just made the optimizer's state by a step of zero gradients, which must not count
        for held in optimizer.state.values():
            if "step" in held:
                held["step"] *= 0
    return {"model": model, "optimizer": optim}


def load_training_state(policy: Policy, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put back what ``training_state`` gave, after a checkpoint filled it in place."""
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_state_dict(
        policy.model.network,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )


def export(policy: Policy, folder: Path, main: bool) -> list[str]:
    """Gather the weights and write them on the main rank; returns the lines of Python that load them."""
    full = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=policy.lora is not None
    )
    state: dict[str, Any] = dict(get_model_state_dict(policy.model.network, options=full))
    if not main:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    metadata = None
    if policy.lora is not None:
        from peft import get_peft_model_state_dict

        network: Any = policy.model.network
        state = get_peft_model_state_dict(network, state_dict=state, adapter_name="default")
        metadata = network.peft_config["default"].to_dict()
    return policy.model.export(folder, state, metadata)
