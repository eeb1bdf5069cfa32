"""The FLUX adapter against FluxPipeline itself, and its export round trips."""

from pathlib import Path

import numpy as np
import pytest
import torch

from jaggrl.diffusion.exploration import Nowhere
from jaggrl.diffusion.noise import generator, normal
from jaggrl.diffusion.schedule import ModelSchedule
from jaggrl.diffusion.solvers import Euler
from jaggrl.errors import UserError
from jaggrl.models.export import export
from jaggrl.models.flux import Flux
from jaggrl.models.policy import Lora, Policy, make_trainable
from jaggrl.prompts import Prompt
from jaggrl.rollout import Rollout, Sampler
from jaggrl.trajectory import Sample
from tests.tiny_flux import tiny_flux, tiny_flux_folder

CAPTIONS = ["a red circle on a white background", "two blue squares on a gray background"]


@pytest.fixture(scope="module")
def flux() -> Flux:
    return tiny_flux()


def ode_pictures(policy: Policy) -> torch.Tensor:
    """Two pictures at four ODE steps, from the evaluation's noise."""
    rollout = Rollout(Sampler(ModelSchedule(4), Nowhere(), Euler()), seed=0, micro_batch=2)
    samples = [Sample(i, i, 0, 0) for i in range(2)]
    return rollout(policy, samples, [Prompt(i, c) for i, c in enumerate(CAPTIONS)], -1).media_B


def pipeline_pictures(pipeline: object, latent_shape: tuple[int, ...]) -> torch.Tensor:
    """The same through FluxPipeline's own loop."""
    z = normal([generator(0, -1, i, 0, "initial") for i in range(2)], latent_shape, torch.device("cpu"))
    packed = pipeline._pack_latents(z, 2, *latent_shape)  # type: ignore[attr-defined]
    pictures = pipeline(  # type: ignore[operator]
        CAPTIONS, height=64, width=64, num_inference_steps=4, guidance_scale=3.5, latents=packed,
        max_sequence_length=20, output_type="np",
    ).images  # fmt: skip
    return torch.from_numpy(np.asarray(pictures)).permute(0, 3, 1, 2)


def policy_of(model: Flux, lora: Lora | None = None) -> Policy:
    torch.manual_seed(0)
    make_trainable(model, lora, checkpointing=False)
    return Policy(model, lora, "fp32", torch.device("cpu"))


def test_ode_rollout_is_flux_pipeline(flux: Flux) -> None:
    ours = ode_pictures(policy_of(flux))
    assert ours.std() > 0
    assert torch.allclose(ours, pipeline_pictures(flux.pipeline, flux.latent_shape), atol=1e-4)


def test_sign_velocity_points_from_data_to_noise(flux: Flux) -> None:
    """Packing and unpacking are inverse, and v keeps its place: a network that returns its input returns z."""
    z = torch.randn(2, *flux.latent_shape)
    network, flux.network = flux.network, EchoNetwork(flux.network.config)
    try:
        v = flux.velocity(z, torch.tensor([0.5, 0.25]), flux.encode(CAPTIONS))
    finally:
        flux.network = network
    assert torch.equal(v, z)


class EchoNetwork(torch.nn.Module):
    """Returns the packed latents."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def forward(self, hidden_states: torch.Tensor, **rest: object) -> tuple[torch.Tensor]:
        return (hidden_states,)


def test_batch_invariance(flux: Flux) -> None:
    """A prompt alone is the prompt beside a longer one."""
    z = torch.randn(2, *flux.latent_shape)
    t = torch.full((2,), 0.5)
    both = flux.velocity(z, t, flux.encode(CAPTIONS))
    alone = flux.velocity(z[:1], t[:1], flux.encode(CAPTIONS[:1]))
    assert torch.allclose(both[:1], alone, atol=1e-5)


def test_guidance_reaches_the_network(flux: Flux) -> None:
    z, t = torch.randn(1, *flux.latent_shape), torch.full((1,), 0.5)
    condition = flux.encode(CAPTIONS[:1])
    at_35 = flux.velocity(z, t, condition)
    flux.guidance = 1.0
    try:
        assert not torch.allclose(at_35, flux.velocity(z, t, condition))
    finally:
        flux.guidance = 3.5


def test_long_prompts_are_cut_and_counted() -> None:
    model = tiny_flux()
    model.encode(["a red circle " * 50])
    assert len(model.truncated) == 1


@pytest.mark.parametrize("lora", [None, Lora(4, 8)], ids=["full", "lora"])
def test_export_reproduces_the_trained_model(tmp_path: Path, lora: Lora | None) -> None:
    """diffusers alone, with the exported weights, makes the trained model's pictures; and they differ from the base."""
    from diffusers import FluxPipeline, FluxTransformer2DModel

    policy = policy_of(tiny_flux(), lora)
    base = ode_pictures(policy)
    with torch.no_grad():
        for p in policy.parameters:
            p += 0.1 * torch.randn_like(p)
    trained = ode_pictures(policy)
    lines = export(policy, tmp_path, main=True)
    assert len(lines) == 2
    pipeline = FluxPipeline.from_pretrained(tiny_flux_folder()).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if lora:
        pipeline.load_lora_weights(tmp_path)
    else:
        pipeline.transformer = FluxTransformer2DModel.from_pretrained(tmp_path / "transformer")
    again = pipeline_pictures(pipeline, policy.model.latent_shape)
    assert torch.allclose(again, trained, atol=1e-4)
    assert not torch.allclose(base, trained, atol=1e-2)
    fresh = tiny_flux()
    fresh.load_export(tmp_path)
    assert torch.allclose(ode_pictures(Policy(fresh, None, "fp32", torch.device("cpu"))), trained, atol=1e-5)


def test_reference_of_lora_is_the_base_model() -> None:
    policy = policy_of(tiny_flux(), Lora(4, 8))
    base = ode_pictures(policy)
    trainable = [n for n, p in policy.model.network.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for p in policy.parameters:
            p += 0.1 * torch.randn_like(p)
    with policy.using("reference"):
        assert torch.equal(ode_pictures(policy), base)
    assert not torch.equal(ode_pictures(policy), base)
    assert trainable == [n for n, p in policy.model.network.named_parameters() if p.requires_grad]


def test_broken_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model_index.json"):
        Flux(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        Flux(str(tmp_path))
    with pytest.raises(UserError, match="multiple of 8"):
        Flux(str(tiny_flux_folder()), resolution=60)
