"""Prompt files: every format, every kind of dirt; and the order they are dealt in."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import jaggrl
from jaggrl.errors import UserError
from jaggrl.paths import resolve_path
from jaggrl.prompts import PromptDealer, PromptSet, load_prompts

KIT = [
    "a red circle",
    "一只猫",
    "قطة",
    "👩‍👩‍👧",
    "e\u0301",
    "line\u2028sep",
    "a\u00a0b",
    'x,y={z} ${q} #1 50% a|b "hi"',
]


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """A file with exactly these bytes."""
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return file


def texts(prompts: PromptSet) -> list[str]:
    """Only the texts."""
    return [p.text for p in prompts]


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_txt_survives_bom_line_ends_blanks_and_spaces(tmp_path, bom, end, caplog):
    lines = ["", "a red circle  ", " ", "\ta blue square", "", "no newline"]
    with caplog.at_level(logging.INFO, "jaggrl.prompts"):
        prompts = load_prompts(write(tmp_path, "p.txt", bom + end.join(lines)))
    assert [(p.id, p.text) for p in prompts] == [(2, "a red circle"), (4, "a blue square"), (6, "no newline")]
    assert "dropped 3 blank of 6" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "jaggrl.prompts"):
        load_prompts(write(tmp_path, "p.txt", f"one{end}two{end}"))
    assert not caplog.records, "the end of the last line is not a blank line"


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".tsv", ".TXT"])
def test_every_format_keeps_every_character(tmp_path, suffix):
    content = {
        ".txt": "\n".join(KIT),
        ".jsonl": "\n".join(json.dumps({"prompt": t, "tag": i}) for i, t in enumerate(KIT)),
        ".json": json.dumps(KIT),
        ".tsv": "Prompt\tCategory\n" + "\n".join(f"{t}\tc{i}" for i, t in enumerate(KIT)),
    }[suffix.lower()]
    assert texts(load_prompts(write(tmp_path, f"p{suffix}", content))) == KIT


def test_metadata_and_line_numbers(tmp_path):
    jsonl = load_prompts(
        write(tmp_path, "p.jsonl", '\ufeff{"prompt": "a", "tag": "x", "n": [1]}\n\n{"prompt": "b"}\n')
    )
    assert [(p.id, p.text, dict(p.metadata)) for p in jsonl] == [
        (1, "a", {"tag": "x", "n": [1]}),
        (3, "b", {}),
    ]
    tsv = load_prompts(write(tmp_path, "p.tsv", 'Prompt\tCategory\na "b" c\tAnimals\n'))
    assert (tsv[0].id, tsv[0].text, dict(tsv[0].metadata)) == (2, 'a "b" c', {"Category": "Animals"})
    listed = load_prompts(write(tmp_path, "p.json", '[{"prompt": "a", "k": 1}, "b"]'))
    assert [(p.id, p.text, dict(p.metadata)) for p in listed] == [(1, "a", {"k": 1}), (2, "b", {})]


def test_duplicates_are_kept_and_the_hash_is_of_the_file(tmp_path):
    one = load_prompts(write(tmp_path, "p.txt", "A cat\nA cat\na cat\n"))
    two = load_prompts(write(tmp_path, "q.txt", "A cat\nA cat\na cat"))
    assert texts(one) == texts(two) == ["A cat", "A cat", "a cat"]
    assert one.sha256 != two.sha256 and len(one.sha256) == 64


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", "", "no prompts"),
        ("p.txt", " \n\n\t\n", "no prompts"),
        ("p.txt", "ok\ncaf\xe9\n".encode("latin-1"), "line 2 is not UTF-8.*LATIN1"),
        ("p.txt", "ok\n".encode("utf-16"), "line 1 is not UTF-8.*UTF-16"),
        ("p.txt", "ok\na\0b\n", "line 2 contains a NUL"),
        ("p.txt", '\n{"prompt": "a"}\n', "rename it to p.jsonl"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"text": "a"}\n', "line 3 has no key 'prompt' .*text"),
        ("p.jsonl", '{"prompt": null}\n', "line 1: the prompt must be a string, not null"),
        ("p.jsonl", '{"prompt": ["a"]}\n', 'line 1: the prompt must be a string, not ."a"'),
        ("p.jsonl", "plain text\n", "line 1 is not JSON"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', "line 1 contains half of a surrogate"),
        ("p.jsonl", "[" * 100_000, "line 1 is"),
        ("p.json", '{"prompt": "a"}', "not a JSON list"),
        ("p.json", '{"prompt": "a"}\n{"prompt": "b"}', "line 2 is not JSON.*jsonl"),
        ("p.json", '["a", 3]', "line 2: the prompt must be a string, not 3"),
        ("p.json", "[]", "no prompts"),
        ("p.tsv", "Text\tCategory\na\tb\n", "line 1 names no column 'Prompt'"),
        ("p.tsv", "Prompt\tCategory\na\n", "line 2 has 1 columns, not 2"),
        ("p.tsv", "Prompt\tCategory\n", "no prompts"),
        ("p.csv", "a\n", "unknown suffix"),
        ("prompts", "a\n", "unknown suffix"),
    ],
)
def test_bad_files_are_refused_in_one_line_naming_the_file(tmp_path, name, content, says):
    file = write(tmp_path, name, content)
    with pytest.raises(UserError, match=says) as error:
        load_prompts(file)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_prompts(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="is a directory"):
        load_prompts(tmp_path)
    with pytest.raises(UserError, match="empty path"):
        load_prompts("")


def test_the_locale_does_not_matter(tmp_path):
    text = "一只猫"
    file = write(tmp_path, "p.txt", text)
    code = (
        f"import jaggrl.prompts as p; assert ascii(p.load_prompts({str(file)!r})[0].text) == {ascii(text)!r}"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env["PYTHONPATH"] = str(Path(jaggrl.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_resolve_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_path("a/b.txt") == tmp_path / "a/b.txt"
    assert resolve_path("package://jaggrl/errors.py") == Path(jaggrl.__file__).parent / "errors.py"
    assert resolve_path("~/x") == Path.home() / "x"
    for bad in ("package://no_such_package_here/x", "package:///x", "package://jaggrl.errors/x"):
        with pytest.raises(UserError, match="no installed package"):
            resolve_path(bad)


def dealer(folder: Path, n: int, per_step: int, seed: int = 0) -> PromptDealer:
    """A dealer over n numbered prompts."""
    return PromptDealer(
        load_prompts(write(folder, f"{n}.txt", "\n".join(f"p{i}" for i in range(n)))), per_step, seed
    )


@pytest.mark.parametrize("n", [1, 2, 5, 6])
@pytest.mark.parametrize("per_step", [1, 2, 5, 7, 16])
def test_every_prompt_is_dealt_once_per_epoch(tmp_path, n, per_step):
    deal = dealer(tmp_path, n, per_step)
    ids = [p.id for _ in range(3 * n) for p in next(deal)]
    assert len(ids) == 3 * n * per_step
    for epoch in range(3 * per_step):
        assert sorted(ids[epoch * n : (epoch + 1) * n]) == list(range(1, n + 1))


def test_order_depends_on_seed_and_epoch_only(tmp_path):
    take = [[p.id for p in next(dealer(tmp_path, 40, 120, seed))] for seed in (0, 0, 1, -1)]
    assert take[0] == take[1]
    assert len({tuple(t) for t in take}) == 3
    assert len({tuple(take[0][i : i + 40]) for i in (0, 40, 80)}) == 3, "reshuffled each epoch"


@pytest.mark.parametrize("stop", range(9))
def test_resume_equals_uninterrupted_over_three_epochs(tmp_path, stop):
    straight = dealer(tmp_path, 7, 3)
    want = [next(straight) for _ in range(9)]
    first = dealer(tmp_path, 7, 3)
    got = [next(first) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    second = dealer(tmp_path, 7, 3)
    second.load_state_dict(state)
    got += [next(second) for _ in range(9 - stop)]
    assert got == want
    assert set(Counter(p.id for step in got for p in step).values()) <= {3, 4}


def test_resume_refuses_another_file_or_seed(tmp_path):
    state = dealer(tmp_path, 7, 3).state_dict()
    with pytest.raises(UserError, match="changed since the checkpoint"):
        dealer(tmp_path, 8, 3).load_state_dict(state)
    with pytest.raises(UserError, match="seed 0, not 1"):
        dealer(tmp_path, 7, 3, seed=1).load_state_dict(state)
    with pytest.raises(UserError, match="at least 1"):
        dealer(tmp_path, 7, 0)
