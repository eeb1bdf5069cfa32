"""The benchmark at a toy size: FLOPs follow the cost model; results are written; bad sizes are refused."""

import json

import pytest

from scripts.bench_backward import main

SMALL = ["--width", "64", "--double", "1", "--single", "2", "--image-tokens", "64", "--text-tokens", "16"]
SMALL += ["--batch", "2", "--threads", "1", "--device", "cpu"]


@pytest.mark.parametrize(
    ("variant", "jagg"),
    [("full", 1.5), ("full_checkpointing", 1.6), ("lora", 4 / 3), ("lora_checkpointing", 1.5)],
)
def test_flops_follow_the_cost_model(variant, jagg, tmp_path):
    strategies = ["exact", "jagg joint", "jagg batched", "jagg sequential", "jagg served"]
    options = ["--variants", variant, "--strategies", *strategies, "--out", str(tmp_path)]
    repeats = "1" if variant == "full" else "0"
    assert main([*SMALL, *options, "--repeats", repeats]) == 0
    bench = json.loads((tmp_path / "bench.json").read_text())
    rows = bench["variants"][variant]
    assert (tmp_path / "bench.png").stat().st_size > 0
    for name in strategies:
        expected = {"exact": 1.0, "jagg served": 2.0}.get(name, jagg)
        assert rows[name]["speedup_model"] == pytest.approx(expected)
        # a LoRA adapter's own weight gradients weigh more at a toy width
        assert rows[name]["speedup_flops"] == pytest.approx(expected, rel=0.06 if "lora" in variant else 0.02)
    assert rows["jagg joint"]["saved_bytes"] > 1.5 * rows["jagg sequential"]["saved_bytes"]
    assert rows["jagg batched"]["saved_bytes"] == pytest.approx(rows["jagg joint"]["saved_bytes"], rel=0.1)
    if repeats == "1":
        parts = rows["exact"]["forward_s"] + rows["exact"]["backward_s"]
        assert 0 < parts <= rows["exact"]["update_s"] * 1.01


@pytest.mark.parametrize(
    "options", [["--width", "100"], ["--image-tokens", "250"], ["--strategies", "subset"]]
)
def test_bad_sizes_are_refused(options, capsys):
    with pytest.raises(SystemExit) as refused:
        main([*SMALL, *options])
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err
