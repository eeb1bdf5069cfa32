"""What the benchmark pulls back: a FLUX with random weights and policy-gradient windows of the real kind."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from jaggrl.algorithms.ratio import clipped_loss
from jaggrl.diffusion.kernels import DanceSDE
from jaggrl.diffusion.schedule import DanceSchedule
from jaggrl.models.policy import Lora
from jaggrl.window import StepLoss, Window

HEAD, CHANNELS, TEXT = 64, 64, 256
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True)
class Size:
    """Of network and batch. The default is a FLUX of 71M parameters on 256 + 64 tokens."""

    width: int = 512
    double: int = 4
    single: int = 8
    image_tokens: int = 256
    text_tokens: int = 64
    batch: int = 4
    window: int = 4


def make_network(size: Size, lora: bool, checkpointing: bool) -> FluxTransformer2DModel:
    """A FLUX transformer at ``size`` with random weights, all of it or LoRA adapters trainable."""
    network = FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=size.double,
        num_single_layers=size.single,
        attention_head_dim=HEAD,
        num_attention_heads=size.width // HEAD,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )
    if lora:
        from peft import LoraConfig  # only the LoRA variants need it

        plan = Lora()
        network.requires_grad_(False)
        network.add_adapter(LoraConfig(r=plan.rank, lora_alpha=plan.alpha, target_modules=list(LORA_TARGETS)))
        for name, p in network.named_parameters():  # B starts at zero: A would get no gradient
            if "lora_B" in name:
                nn.init.normal_(p, std=0.01)
    if checkpointing:
        network.enable_gradient_checkpointing()
    network.eval()
    return network


class Subject:
    """One window of stored states: velocities by the network, losses by DanceGRPO's clipped objective."""

    def __init__(self, network: FluxTransformer2DModel, size: Size, device: torch.device, bf16: bool) -> None:
        self.network, self.size, self.device, self.bf16 = network, size, device, bf16
        schedule = DanceSchedule(21, 3.0)(lambda steps: torch.linspace(1, 0, steps + 1))
        draw = torch.Generator().manual_seed(0)
        shape = (size.window + 1, size.batch, size.image_tokens, CHANNELS)
        self.states = torch.randn(shape, generator=draw).to(device)
        self.old_velocities = torch.randn(shape, generator=draw).to(device)
        self.text = torch.randn(1, size.text_tokens, TEXT, generator=draw).to(device)
        self.pooled = torch.randn(1, TEXT, generator=draw).to(device)
        self.advantage = torch.randn(size.batch, generator=draw).to(device)
        self.t_W, self.sigma_S = schedule.t_S[: size.window], schedule.sigma_S.to(device)
        side = int(size.image_tokens**0.5)
        rows, columns = torch.arange(size.image_tokens) // side, torch.arange(size.image_tokens) % side
        self.image_ids = torch.stack([torch.zeros_like(rows), rows, columns], 1).float().to(device)
        self.text_ids = torch.zeros(size.text_tokens, 3, device=device)
        self.kernel = DanceSDE(0.3)

    def velocities(self, js: Sequence[int]) -> list[Tensor]:
        """The raw outputs of several steps, in one forward."""
        B = self.size.batch
        z = torch.cat([self.states[j] for j in js])
        t = torch.cat([self.t_W[j].expand(B) for j in js]).to(self.device)
        cast = torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()
        with cast:
            out = self.network(
                hidden_states=z,
                timestep=t,
                guidance=torch.full_like(t, 3.5),
                encoder_hidden_states=self.text.expand(len(z), -1, -1),
                pooled_projections=self.pooled.expand(len(z), -1),
                img_ids=self.image_ids,
                txt_ids=self.text_ids,
                return_dict=False,
            )[0]
        return list(out.chunk(len(js)))

    def loss(self, j: int, raw: Tensor) -> StepLoss:
        """The clipped objective at step j; the old log-probability is the present one, as at first."""
        sigma_B, next_B = (self.sigma_S[k].expand(self.size.batch) for k in (j, j + 1))
        log_prob = self.kernel(raw, self.states[j], sigma_B, next_B).log_prob(self.states[j + 1])
        ratio = (log_prob - log_prob.detach()).exp()
        return StepLoss(clipped_loss(ratio, self.advantage, 1e-4).mean() / self.size.window)

    def window(self, fresh: bool) -> Window:
        """The window; ``fresh`` serves its middle velocities."""
        t_WB = self.t_W.unsqueeze(1).expand(-1, self.size.batch)
        return Window(t_WB, 0.0, self.velocities, self.loss, lambda j: self.old_velocities[j], fresh)
