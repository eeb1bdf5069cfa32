"""The cosine of a transformers CLIP model, which CLIPScore and PickScore share.

``s(x, c) = cos(E_image(x), E_text(c))``: neither the logit scale, nor 2.5, nor 100, nor a clamp at 0.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from jaggrl.errors import UserError
from jaggrl.paths import resolve_path
from jaggrl.prompts import Prompt
from jaggrl.rewards.base import Reward, RewardCard, needs, sha256_of, torch_dtype
from jaggrl.rewards.text import Truncation, visible

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
PROCESSOR = ("preprocessor_config.json", "processor_config.json")


class ClipCosine(Reward):
    """Cosine of projected image and text features (B,), in fp32.

    Args:
        model: a folder, or a hub id whose files already lie in the local cache; nothing is downloaded.
        processor: the same for image processor and tokenizer; the model's own when None.
        version: quoted in the card.
        fetch: how to get the files, quoted when one is missing.
        device: where the model lives.
        dtype: of weights and activations; features are normalised and multiplied in fp32.
    """

    name: str
    truncation: Truncation

    def __init__(
        self,
        model: str,
        processor: str | None = None,
        version: str = "1",
        fetch: str = "",
        device: str | torch.device = "cpu",
        dtype: str = "float32",
    ) -> None:
        lacks = self.missing({"model": model, "processor": processor, "fetch": fetch})
        folder, processor_folder = local_folder(model), local_folder(processor or model)
        weights = _first_of(folder, WEIGHTS)
        if lacks or folder is None or weights is None:
            raise UserError("; ".join(lacks))
        self.device, self.dtype = torch.device(device), torch_dtype(dtype)
        try:
            net = CLIPModel.from_pretrained(folder, local_files_only=True)
            self.processor = CLIPProcessor.from_pretrained(processor_folder, local_files_only=True)
        except Exception as error:  # transformers raises everything from KeyError to SafetensorError
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.name} cannot load {folder} ({reason}): fetch the folder again") from error
        self._check_end_token(net.config.text_config.eos_token_id)
        self.model = net.eval().requires_grad_(False).to(self.device, self.dtype)
        self.tokens = int(net.config.text_config.max_position_embeddings)
        self.truncation = Truncation(self.name, self.tokens)
        self.card = RewardCard(self.name, model, sha256_of(weights), version, "cosine", (-1.0, 1.0))

    @classmethod
    def missing(cls, config: Mapping[str, Any]) -> list[str]:
        """The absent folders, or the first absent file in each."""
        model, processor = config["model"], config.get("processor") or config["model"]
        absent: list[object] = []
        for path, names in ((model, ("config.json",)), (model, WEIGHTS), (processor, PROCESSOR)):
            folder = local_folder(path)
            if folder is None:
                absent.append(path)
            elif _first_of(folder, names) is None:
                absent.append(folder / names[0])
        return needs(cls.name, absent, config.get("fetch"))

    def _check_end_token(self, pooled: int) -> None:
        """The text tower pools at the first ``pooled`` token, and at the largest id if ``pooled`` is 2."""
        end = self.processor.tokenizer.eos_token_id
        if pooled not in (2, end):  # 2: how the published configs were written before it meant anything
            message = f"the tokenizer has end token {end}, the text tower pools at {pooled}"
            raise UserError(f"{self.name}: {message}: correct eos_token_id in the model's config.json")

    def __call__(self, media_B: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Cosines (B,) of pictures (B, 3, H, W) in [0, 1] and their prompts."""
        text = self._tokenize([prompt.text for prompt in prompts])
        # The processor gets 8-bit pictures, as in the published pipelines: they round again after resizing.
        images = list((media_B * 255).round().to(torch.uint8).cpu())
        pixels_B = self.processor.image_processor(
            images, return_tensors="pt", input_data_format="channels_first"
        )["pixel_values"].to(self.device, self.dtype)
        with torch.no_grad():
            image_B = features(self.model.get_image_features(pixel_values=pixels_B))
            text_B = features(self.model.get_text_features(**text))
        return F.cosine_similarity(image_B.float(), text_B.float(), dim=-1)

    def _tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """Token ids and mask (B, T <= tokens). The end token is kept: its state is the embedding."""
        tokenizer = self.processor.tokenizer
        texts = [visible(text, self.tokens) for text in texts]
        whole = tokenizer(texts, verbose=False)["input_ids"]
        self.truncation.note({text: len(ids) for text, ids in zip(texts, whole, strict=True)})
        batch = tokenizer(texts, padding=True, truncation=True, max_length=self.tokens, return_tensors="pt")
        return {key: batch[key].to(self.device) for key in ("input_ids", "attention_mask")}


def features(output: Any) -> Tensor:
    """Projected features (B, D): transformers 4 returns the tensor, 5 an output that holds it."""
    return output if isinstance(output, Tensor) else output.pooler_output


def local_folder(path: str) -> Path | None:
    """The folder of a path, or of a hub id in the local cache; None if it is not there. Downloads nothing."""
    folder = resolve_path(path)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _first_of(folder: Path | None, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None) if folder else None
