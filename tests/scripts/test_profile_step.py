"""The step profile at a toy size: its stages add up to the step, and host reads are found where they are."""

import json

import torch

from scripts.profile_step import main
from scripts.profiling.ledger import Ledger, counted
from tests.tiny_flux import tiny_flux_folder


def test_stages_add_up_and_values_read_by_the_host_are_told_by_stage():
    ledger = Ledger(torch.device("cpu"))
    x = torch.ones(3)

    def work():
        with ledger("outer"):
            float(x.sum())
            with ledger("inner"):
                x.sum().item()
                x.max().item()

    work()
    assert ledger.calls == {"outer": 1, "inner": 1} and ledger.stage == ""
    assert ledger.seconds["inner"] > 0 and ledger.seconds["outer"] > 0
    found = counted(work, torch.device("cpu"))
    assert (found["outer"]["host_reads"], found["inner"]["host_reads"]) == (1, 2)


def test_a_whole_step_is_told(tmp_path, capsys):
    sizes = ["group_size=2", "prompts_per_rollout=1", "micro_batch=2", "reward=shapes_verifier"]
    options = ["--steps", "1", "--warmup", "0", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*sizes, f"model.path={tiny_flux_folder()}", *options]) == 0
    told = json.loads((tmp_path / "profile.json").read_text())
    rows = {row["stage"]: row for row in told["rows"]}
    assert abs(sum(row["share"] for row in rows.values()) - 1) < 1e-6
    assert rows["rollout: network forward"]["calls"] == 6
    assert rows["update: forward with graph"]["calls"] == rows["update: losses, cotangents"]["calls"] - 3 == 2
    assert rows["update: backward"]["ms"] > 0 and rows["unaccounted"]["share"] < 0.5
    assert "host reads" in capsys.readouterr().out


def test_bad_input_is_refused(capsys):
    assert main(["experiment=shapes_dance", "backward.graph=parallel", "--threads", "1"]) == 2
    assert "backward.graph=parallel" in capsys.readouterr().err
