"""Small tokenizers made from the captions' own words, in the formats of CLIP, T5 and open_clip."""

import gzip
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, T5Tokenizer

from jaggrl.shapes.captions import captions, specs
from jaggrl.shapes.scene import CATEGORIES

T5_LENGTH = 20
"""The `max_sequence_length` that the pipeline is trained and ships with: the longest caption has 14 words."""
CLIP_LENGTH = 24
"""Context of the CLIP text encoders, special tokens included."""


def words() -> list[str]:
    """Every word of the grammar, sorted."""
    return sorted(
        {
            word
            for name in CATEGORIES
            for spec in specs(name)
            for text in captions(spec)
            for word in text.split()
        }
    )


def bytes_to_unicode() -> list[str]:
    """The 256 printable characters that stand for bytes, in the order that CLIP's vocabulary lists them."""
    spans = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    plain = [byte for first, last in spans for byte in range(ord(first), ord(last) + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


def bpe_merges() -> list[tuple[str, str]]:
    """Byte-pair merges that make one token of every word of the grammar."""
    model = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=5000, min_frequency=1, end_of_word_suffix="</w>", show_progress=False
    )
    model.train_from_iterator(words(), trainer)
    found = json.loads(model.to_str())["model"]["merges"]
    return [(pair[0], pair[1]) for pair in found]


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer over the small vocabulary: bytes, bytes that end a word, merges, start, end."""
    pieces = bytes_to_unicode()
    merges = bpe_merges()
    listed = [*pieces, *(f"{piece}</w>" for piece in pieces), *("".join(pair) for pair in merges)]
    listed += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(listed))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_LENGTH)


def t5_tokenizer() -> T5Tokenizer:
    """T5's tokenizer with one piece per word, and letters for words it does not know."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -1.0) for word in words() if word not in letters]
    pieces += [("▁a", -1.0)] + [(letter, -10.0) for letter in letters]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)


def write_open_clip_bpe(path: Path) -> None:
    """The merges as the gzipped file that `open_clip.SimpleTokenizer(bpe_path=...)` reads."""
    lines = ["#version: 0.2", *(" ".join(pair) for pair in bpe_merges())]
    # mtime 0: the same words give the same bytes.
    path.write_bytes(gzip.compress("\n".join(lines).encode("utf-8"), mtime=0))
