"""From config to a policy: what is held in which precision."""

import pytest
import torch

from jaggrl.build import build_policy
from jaggrl.infra.distributed import Ranks
from tests.test_config import composed
from tests.tiny_flux import tiny_flux_folder


@pytest.mark.parametrize("lora", ["null", "{rank: 2, alpha: 4}"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_frozen_weights_are_held_in_bf16(lora: str, precision: str) -> None:
    config = composed(f"model.path={tiny_flux_folder()}", f"lora={lora}", f"precision={precision}")
    policy = build_policy(config, Ranks(0, 1, torch.device("cpu")))
    frozen = torch.bfloat16 if precision == "bf16" else torch.float32
    model = policy.model
    assert {p.dtype for m in model.text_encoders() for p in m.parameters()} == {frozen}
    assert {p.dtype for p in model.pipeline.vae.parameters()} == {torch.float32}
    assert {p.dtype for p in policy.parameters} == {torch.float32}
    rest = {p.dtype for p in model.network.parameters() if not p.requires_grad}
    assert rest == (set() if lora == "null" else {frozen})
    condition = model.encode(["a red circle"])
    assert all(x.dtype == torch.float32 for x in condition.tensors.values())
    z = torch.zeros(1, *model.latent_shape)
    assert policy.velocity(z, torch.ones(1), condition).isfinite().all()
