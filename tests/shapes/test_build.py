"""The parts of the build that could go wrong silently: tokenizers, mistakes, losses, folders, imports."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from jaggrl.shapes.captions import captions, specs
from jaggrl.shapes.scene import CATEGORIES
from scripts.build_shapes_world import main
from scripts.shapes_world.common import replace_folder
from scripts.shapes_world.preference import accuracy, mistaken, preference_loss
from scripts.shapes_world.tokens import T5_LENGTH, clip_tokenizer, t5_tokenizer, words, write_open_clip_bpe


def test_the_package_imports_no_deep_learning_library():
    code = (
        "import sys, jaggrl.shapes.captions, jaggrl.shapes.render, jaggrl.shapes.verifier;"
        "print({'torch', 'diffusers', 'transformers', 'open_clip'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_word_is_one_token_and_captions_fit():
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    assert all(len(clip.tokenize(word)) == len(t5.tokenize(word)) == 1 for word in words())
    longest = max(
        (t for c in CATEGORIES for s in specs(c) for t in captions(s)), key=lambda t: len(t.split())
    )
    assert len(t5(longest).input_ids) < T5_LENGTH
    assert t5.unk_token_id not in t5("a purple zebra").input_ids


def test_open_clip_reads_the_same_vocabulary(tmp_path):
    import open_clip

    write_open_clip_bpe(tmp_path / "bpe.txt.gz")
    tokenizer = open_clip.SimpleTokenizer(bpe_path=str(tmp_path / "bpe.txt.gz"))
    assert tokenizer.vocab_size == len(clip_tokenizer())
    assert all(len(tokenizer.encode(word)) == 1 for word in words())


def test_a_mistaken_spec_differs():
    rng = np.random.default_rng(0)
    for category in CATEGORIES:
        for spec in list(specs(category))[::7]:
            assert mistaken(spec, rng) != spec


def test_preference_loss_is_the_softmax_over_the_pair():
    better, worse = torch.tensor([0.3, 0.1]), torch.tensor([0.28, 0.2])
    logits = 100.0 * torch.stack([better, worse], dim=1)
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(preference_loss(better, worse, 100.0), expected)


def test_accuracy_counts_ordered_pairs():
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 0.0]])
    assert accuracy(scores) == {
        "clean_over_degraded": 0.5,
        "right_over_wrong_clean": 0.5,
        "right_over_wrong_degraded": 1.0,
        "right_degraded_over_wrong_clean": 0.5,
    }


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "weights"
    for text in ("old", "new"):
        replace_folder(target, lambda folder, text=text: (folder / text).write_text(text) and None)
    assert [path.name for path in tmp_path.rglob("*")] == ["weights", "new"]


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--stages", "vea"])
    assert stopped.value.code == 2 and "invalid choice: 'vea'" in capsys.readouterr().err
