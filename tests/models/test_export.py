"""Training state for checkpoints, and exports: what a state dict must not change, and what foreign weights say."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jaggrl.errors import UserError
from jaggrl.models import base
from jaggrl.models.export import export, load_training_state, training_state
from jaggrl.models.policy import Lora, Policy, make_trainable
from jaggrl.trajectory import Condition
from tests.tiny_flux import tiny_flux
from tests.toys import CPU, ToyModel, toy_policy


def stepped(policy: Policy, optimizer: torch.optim.Optimizer, times: int = 2) -> list[Tensor]:
    """Parameters after updates with gradients of 1, 2, ..."""
    for k in range(times):
        for p in policy.parameters:
            p.grad = torch.full_like(p, k + 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [p.detach().clone() for p in policy.parameters]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_looking_at_a_fresh_optimizer_counts_no_step(kind: type[torch.optim.Optimizer]) -> None:
    """torch makes an optimizer's state by a step of zero gradients: Adam's bias correction would take it for one."""
    alone, looked_at, loaded = (toy_policy() for _ in range(3))
    optimizers = [kind(p.parameters, lr=1e-2) for p in (alone, looked_at, loaded)]
    want = stepped(alone, optimizers[0])
    state = training_state(looked_at, optimizers[1])
    load_training_state(loaded, optimizers[2], deepcopy(state))
    for policy, optimizer in zip((looked_at, loaded), optimizers[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(stepped(policy, optimizer), want, strict=True))


@pytest.mark.parametrize("lora", [None, Lora(4, 8)], ids=["full", "lora"])
def test_export_of_another_model_is_one_line(tmp_path: Path, lora: Lora | None) -> None:
    model = tiny_flux()
    make_trainable(model, lora, checkpointing=False)
    export(Policy(model, lora, "fp32", CPU), tmp_path, main=True)
    other = tiny_flux()
    other.network = other.pipeline.transformer = wider(other.network)
    with pytest.raises(UserError, match="cannot be loaded into") as caught:
        other.load_export(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="neither transformer/ nor"):
        other.load_export(tmp_path / "nothing")


def wider(network: torch.nn.Module) -> torch.nn.Module:
    """The same class with another number of heads."""
    config = dict(network.config) | {"num_attention_heads": 3}  # type: ignore[arg-type]
    return type(network).from_config(config)  # type: ignore[attr-defined]


class Counted(ToyModel):
    """Counts what is encoded."""

    encoded: list[str]

    def encode_texts(self, texts: list[str]) -> Condition:  # type: ignore[override]
        """As the toy."""
        self.__dict__.setdefault("encoded", []).extend(texts)
        return super().encode_texts(texts)


def test_encoded_prompts_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counted()
    row = model.encode(["a"]).tensors["c"].nbytes
    monkeypatch.setattr(base, "CACHE_BYTES", 2 * row)
    got = model.encode(["a", "bb", "ccc", "a"]).tensors["c"]
    assert torch.equal(got, ToyModel().encode_texts(["a", "bb", "ccc", "a"]).tensors["c"])
    model.encode(["ccc", "bb"])
    assert model.encoded == ["a", "bb", "ccc"]
    model.encode(["a"])
    assert model.encoded == ["a", "bb", "ccc", "a"]
