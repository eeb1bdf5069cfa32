"""Every algorithm, full and LoRA: a run that was checkpointed and went on in a new process's objects loses nothing."""

from pathlib import Path

import pytest
import torch

from jaggrl.infra.checkpoint import Checkpoints
from jaggrl.infra.distributed import Ranks
from jaggrl.models.export import load_training_state
from tests.algorithms.presets import PRESETS
from tests.distributed.ranks_script import state_of, trainer_of
from tests.distributed.setups import PROVED, Cell, diagonal, every_cell
from tests.toys import CPU

ALONE = Ranks(0, 1, CPU)


def left_behind(cell: Cell, folder: Path) -> str:
    """Four steps against two, a checkpoint, and two more by new objects with other weights (AdamW): what differs."""
    whole = trainer_of(cell, ALONE, optimizer=torch.optim.AdamW)
    for _ in range(2):
        whole.step()
    checkpoints = Checkpoints(folder)
    path = checkpoints.save(2, state_of(whole))
    parts = trainer_of(cell, ALONE, scale=0.5, optimizer=torch.optim.AdamW)
    state = state_of(parts)
    checkpoints.load(path, state)
    load_training_state(parts.policy, parts.optimizer, state)
    parts.load_state_dict(state["trainer"])
    for step in (3, 4):
        ours, theirs = ({k: v for k, v in t.step().items() if "time/" not in k} for t in (parts, whole))
        told = {k: (v, theirs[k]) for k, v in ours.items() if v != theirs[k] and v == v}
        if told or ours.keys() != theirs.keys():
            return f"metrics of step {step}: {told}"
    one, other = (t["trainer"]["shadows"] | {"weights": t["model"]} for t in map(state_of, (whole, parts)))
    if one.keys() != other.keys():
        return f"shadows {list(one)} and {list(other)}"
    for name, tensors in one.items():
        if not all(torch.equal(tensor, other[name][key]) for key, tensor in tensors.items()):
            return f"{name} differ"
    return ""


def check_cells(cells: list[Cell], folder: Path) -> None:
    told = {":".join(cell): left_behind(cell, folder / str(i)) for i, cell in enumerate(cells)}
    assert not [f"{name}: {what}" for name, what in told.items() if what]


@pytest.mark.parametrize("name", PRESETS)
def test_four_steps_equal_two_resume_two(name: str, tmp_path: Path) -> None:
    check_cells([cell for cell in diagonal() if cell.algorithm == name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", PROVED)
def test_four_steps_equal_two_resume_two_in_every_cell(strategy: str, tmp_path: Path) -> None:
    done = set(diagonal())
    check_cells([c for c in every_cell() if c.strategy == strategy and c not in done], tmp_path)


def test_what_each_algorithm_carries_over() -> None:
    """The reference for KL (a copy under full fine-tuning, the bypassed adapter under LoRA), NFT's lagged policy."""
    carried = {
        (cell.algorithm, cell.model): set(trainer_of(cell, ALONE).policy.shadows.names) - {"ema"}
        for cell in diagonal()
    }
    assert carried["flow_grpo", "toy"] == carried["diffusion_art", "toy"] == set()
    assert carried["flow_grpo_kl", "toy"] == {"reference"}
    assert carried["flow_grpo_kl", "toy_lora"] == set()
    assert carried["diffusion_nft", "toy"] == {"old", "reference"}
    assert carried["diffusion_nft", "toy_lora"] == {"old"}
