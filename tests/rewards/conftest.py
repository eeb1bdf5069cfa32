"""Tiny random models, saved in the very formats of the published scorers."""

import gzip
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.rewards.tiny import IMAGE_SIZE, OPEN_CLIP


@pytest.fixture(scope="session")
def hpsv2_files(tmp_path_factory) -> Path:
    """A folder with config.json and checkpoint.pt of a tiny open_clip model."""
    import open_clip

    folder = tmp_path_factory.mktemp("hpsv2")
    torch.manual_seed(0)
    model = open_clip.CLIP(**OPEN_CLIP)
    (folder / "config.json").write_text(json.dumps(OPEN_CLIP))
    torch.save({"state_dict": model.state_dict()}, folder / "checkpoint.pt")
    return folder


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory) -> Path:
    """A tiny CLIPModel with the published vocabulary, image processor and tokenizer."""
    from open_clip.tokenizer import SimpleTokenizer
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**tower, "image_size": IMAGE_SIZE, "patch_size": 8}
    text = {**tower, "vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    model.save_pretrained(folder)
    merges = SimpleTokenizer()
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocab = {names.get(token, token): index for token, index in merges.encoder.items()}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=list(merges.bpe_ranks), model_max_length=77)
    images = CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=IMAGE_SIZE)
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def package():
    """The ``hpsv2`` package's scorer module and its copy of open_clip, or a skip where it is not installed."""
    if importlib.util.find_spec("hpsv2") is None:
        pytest.skip("the reference is not installed: pip install --no-deps hpsv2==1.2.0")
    from open_clip.tokenizer import default_bpe

    with pytest.MonkeyPatch.context() as patch:
        # Its wheel lacks the vocabulary, which is open_clip's; a progress bar and tkinter are imported without
        # being needed.
        opened = gzip.open
        patch.setattr(
            gzip, "open", lambda file, *a: opened(default_bpe() if "hpsv2" in str(file) else file, *a)
        )
        for name, attribute in (("clint", None), ("clint.textui", "progress"), ("turtle", "forward")):
            stub = types.ModuleType(name)
            if attribute:
                setattr(stub, attribute, None)
            patch.setitem(sys.modules, name, stub)
        return importlib.import_module("hpsv2.img_score"), importlib.import_module("hpsv2.src.open_clip")
