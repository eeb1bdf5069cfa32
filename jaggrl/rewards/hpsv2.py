"""HPSv2 and HPSv2.1 (Wu et al., arXiv:2306.09341): an open_clip model fine-tuned on human preferences.

``HPS(x, c) = cos(E_image(x), E_text(c))``, without the logit scale: about 0.25 to 0.35 for v2.1, as in the
papers' tables. The published checkpoint ``HPS_v2.1_compressed.pt`` is read unchanged, on the architecture
``ViT-H-14``; the base weights of open_clip are not needed, since the checkpoint holds all tensors.

Values of v2.0 and v2.1 cannot be compared. The reference implementation scores under fp16 autocast (steps of
2.4e-4 around 0.3) and resizes with whatever antialias default torchvision has; here the product is in fp32
and antialiasing is on.
"""

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
from open_clip.tokenizer import SimpleTokenizer, default_bpe
from torch import Tensor

from jaggrl.errors import UserError, unknown
from jaggrl.paths import resolve_path
from jaggrl.prompts import Prompt
from jaggrl.rewards.base import Reward, RewardCard, needs, sha256_of, torch_dtype
from jaggrl.rewards.text import Truncation, visible


class HPSv2(Reward):
    """Cosine of the normalised image and text features (B,), in fp32.

    Args:
        checkpoint: a ``.pt`` file whose key ``state_dict`` holds all weights.
        model: an architecture that open_clip knows by name, or the path of such a config as ``.json``.
        bpe: the tokenizer's merges (gzip); open_clip's own when None.
        version: quoted in the card.
        fetch: how to get the files, quoted when one is missing.
        device: where the model lives.
        dtype: of weights and activations; features are normalised and multiplied in fp32.
    """

    truncation: Truncation

    def __init__(
        self,
        checkpoint: str,
        model: str = "ViT-H-14",
        bpe: str | None = None,
        version: str = "v2.1",
        fetch: str = "",
        device: str | torch.device = "cpu",
        dtype: str = "float32",
    ) -> None:
        lacks = self.missing({"checkpoint": checkpoint, "model": model, "bpe": bpe, "fetch": fetch})
        if lacks:
            raise UserError("; ".join(lacks))
        self.device, self.dtype = torch.device(device), torch_dtype(dtype)
        file = resolve_path(checkpoint)
        self.model = _load(model, file).eval().requires_grad_(False).to(self.device, self.dtype)
        self.size = int(_first(self.model.visual.image_size))
        self.tokens = int(self.model.context_length)
        merges = str(resolve_path(bpe)) if bpe else default_bpe()
        self.tokenizer = SimpleTokenizer(bpe_path=merges, context_length=self.tokens)
        if self.tokenizer.vocab_size != self.model.vocab_size:
            sizes = f"{self.tokenizer.vocab_size} tokens, the model {self.model.vocab_size}"
            raise UserError(f"the tokenizer {merges} has {sizes}: give the file the model was trained with")
        self.truncation = Truncation("hpsv2", self.tokens)
        self.card = RewardCard("hpsv2", model, sha256_of(file), version, "cosine", (-1.0, 1.0))

    @classmethod
    def missing(cls, config: Mapping[str, Any]) -> list[str]:
        """The absent ones of checkpoint, model config and merges."""
        wanted = [config["checkpoint"]]
        if str(config.get("model", "")).endswith(".json"):
            wanted.append(config["model"])
        if config.get("bpe"):
            wanted.append(config["bpe"])
        files = [resolve_path(path) for path in wanted]
        return needs("hpsv2", [file for file in files if not file.is_file()], config.get("fetch"))

    def __call__(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Cosines (B,) of pictures (B, 3, H, W) in [0, 1] and their prompts."""
        texts = [visible(prompt.text, self.tokens) for prompt in prompts]
        self.truncation.note({text: len(self.tokenizer.encode(text)) + 2 for text in set(texts)})
        with torch.no_grad():
            pixels_B = preprocess(media_B.to(self.device), self.size).to(self.dtype)
            image_B = self.model.encode_image(pixels_B).float()
            text_B = self.model.encode_text(self.tokenizer(texts).to(self.device)).float()
        return F.cosine_similarity(image_B, text_B, dim=-1)


def preprocess(media_B: Tensor, size: int) -> Tensor:
    """Scale the longer side to ``size`` (bicubic, antialiased), pad with black to a square, normalise.

    (B, 3, H, W) in [0, 1] -> (B, 3, size, size). Padding comes before normalisation, as in the reference,
    which pads only when it scales; a picture that already has the right longer side is padded all the same.
    """
    scale = size / max(media_B.shape[-2:])
    height, width = (max(1, round(side * scale)) for side in media_B.shape[-2:])
    if scale != 1:
        media_B = F.interpolate(media_B, (height, width), mode="bicubic", align_corners=False, antialias=True)
    top, left = (size - height) // 2, (size - width) // 2
    media_B = F.pad(media_B, (left, size - width - left, top, size - height - top))
    mean, std = (media_B.new_tensor(c).view(3, 1, 1) for c in (OPENAI_DATASET_MEAN, OPENAI_DATASET_STD))
    return (media_B - mean) / std


def _load(model: str, checkpoint: Path) -> open_clip.CLIP:
    """The architecture with the checkpoint's weights, or a :class:`UserError`; downloads nothing."""
    config = _architecture(model)
    try:
        net = open_clip.CLIP(**config)
    except (TypeError, AttributeError) as error:
        raise UserError(
            f"{model} is not an open_clip CLIP config ({error}): give one like ViT-H-14's"
        ) from error
    try:
        # weights_only: a checkpoint from the net may not run code.
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        pickle.UnpicklingError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{checkpoint} is no checkpoint with a key 'state_dict' ({reason}): fetch it again"
        ) from error
    try:
        net.load_state_dict(weights)
    except (RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{checkpoint} does not fit the architecture {model}: {reason}") from error
    return net


def _architecture(model: str) -> dict[str, Any]:
    if not model.endswith(".json"):
        config = open_clip.get_model_config(model)
        if config is None:
            raise unknown("open_clip architecture", model, open_clip.list_models())
        return dict(config)
    file = resolve_path(model)
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is no JSON object ({error}): give an open_clip model config") from error


def _first(size: Any) -> Any:
    return size[0] if isinstance(size, tuple | list) else size
