"""Joining the ranks: what the environment says, and what it must not say."""

import pytest

from jaggrl.errors import UserError
from jaggrl.infra.distributed import start


def test_tasks_of_srun_without_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train alone, in a folder of its own."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(UserError, match="srun started 8 tasks .* torchrun"):
        start("cpu")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert start("cpu").world == 1
