"""Prompt files and the endless, resumable order in which a run deals them.

Files are UTF-8, with or without BOM, with any line ends, and are recognised by suffix:

====== ===================================================================================================
.txt   one prompt per line
.jsonl one JSON object with ``prompt`` (or one JSON string) per line; other keys become the metadata
.json  a list of strings or of such objects
.tsv   a header line with a ``Prompt`` column; the other columns become the metadata
====== ===================================================================================================

Prompts are files and never command-line values: text with ``,`` ``=`` ``{}`` ``$`` or quotes needs no escape.
"""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaggrl.errors import UserError
from jaggrl.paths import resolve_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file."""

    id: int
    """Physical line of the file, counted from 1 as editors do (for .json: the item's number)."""
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSet:
    """All prompts of one file, in file order, duplicates kept."""

    path: Path
    sha256: str
    """Of the file's bytes; part of a run's record and of a resume check."""
    prompts: tuple[Prompt, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)


_Raw = tuple[int, Any]  # a line number and a JSON value: a string or an object


def load_prompts(path: str | Path) -> PromptSet:
    """Read a prompt file; blank prompts are dropped and counted in the log, nothing else is.

    Raises :class:`UserError`, naming file and line, for anything but a readable file with prompts.
    """
    file = resolve_path(path)
    read = _READERS.get(file.suffix.lower())
    data = _read_bytes(file)
    if read is None:
        raise UserError(
            f"prompt file {file} has an unknown suffix: name it {', '.join(_READERS)} by its format"
        )
    prompts, blank = [], 0
    for line, value in read(file, _decode(file, data)):
        prompt = _prompt(file, line, value)
        if prompt.text:
            prompts.append(prompt)
        else:
            blank += 1
    if not prompts:
        raise UserError(f"prompt file {file} has no prompts: write at least one line")
    if blank:
        log.info("%s: dropped %d blank of %d prompts", file, blank, blank + len(prompts))
    return PromptSet(file, hashlib.sha256(data).hexdigest(), tuple(prompts))


def _read_bytes(file: Path) -> bytes:
    if file.is_dir():
        raise UserError(f"prompt file {file} is a directory: name a file in it, such as {file / 'train.txt'}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"prompt file {file} cannot be read ({error.strerror}): check the path") from error


def _decode(file: Path, data: bytes) -> str:
    """UTF-8 text with ``\\n`` line ends; whatever the locale says."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        remedy = "convert it with: iconv -f LATIN1 -t UTF-8"
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            remedy = "convert it with: iconv -f UTF-16 -t UTF-8"
        raise UserError(f"prompt file {file}, line {line} is not UTF-8: {remedy}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def _prompt(file: Path, line: int, value: Any) -> Prompt:
    """Check one raw value; an empty text is left to the caller to drop and count."""
    where = f"prompt file {file}, line {line}"
    metadata: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        if "prompt" not in value:
            raise UserError(
                f"{where} has no key 'prompt' (keys: {', '.join(map(str, value)) or 'none'}): add it"
            )
        metadata = {k: v for k, v in value.items() if k != "prompt"}
        value = value["prompt"]
    if not isinstance(value, str):
        raise UserError(f"{where}: the prompt must be a string, not {json.dumps(value)[:60]}")
    if "\0" in value:
        raise UserError(f"{where} contains a NUL character: remove it, or convert the file to UTF-8 text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where} contains half of a surrogate pair: write the character itself") from error
    return Prompt(line, value.strip(), metadata)


def _read_txt(file: Path, text: str) -> Iterator[_Raw]:
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 and form feeds, which prompts do contain.
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{") and _is_prompt_object(first):
        raise UserError(
            f"prompt file {file} holds JSON lines: rename it to {file.with_suffix('.jsonl').name}"
        )
    yield from enumerate(lines, 1)


def _is_prompt_object(line: str) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "prompt" in value


def _read_jsonl(file: Path, text: str) -> Iterator[_Raw]:
    for number, line in enumerate(text.split("\n"), 1):
        yield number, _json(file, number, line) if line.strip() else ""


def _read_json(file: Path, text: str) -> Iterable[_Raw]:
    value = _json(file, 1, text)
    if not isinstance(value, list):
        raise UserError(
            f"prompt file {file} is not a JSON list: write a list, or one object per line in a .jsonl"
        )
    return enumerate(value, 1)


def _json(file: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        hint = "; one JSON value per line belongs in a .jsonl" if error.msg == "Extra data" else ""
        raise UserError(f"prompt file {file}, line {line} is not JSON: {error.msg}{hint}") from error
    except RecursionError as error:
        raise UserError(f"prompt file {file}, line {line} is nested too deeply: flatten it") from error


def _read_tsv(file: Path, text: str) -> Iterator[_Raw]:
    header, *rows = text.split("\n")
    names = [name.strip() for name in header.split("\t")]
    column = next((i for i, name in enumerate(names) if name.lower() == "prompt"), None)
    if column is None:
        raise UserError(
            f"prompt file {file}, line 1 names no column 'Prompt' (columns: {', '.join(names)}): add it"
        )
    for number, row in enumerate(rows, 2):
        cells = row.split("\t")
        if not row.strip():
            yield number, ""
        elif len(cells) != len(names):
            raise UserError(
                f"prompt file {file}, line {number} has {len(cells)} columns, not {len(names)}: mend it"
            )
        else:
            extra = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
            del extra[names[column]]
            yield number, {**extra, "prompt": cells[column]}


_READERS: Mapping[str, Callable[[Path, str], Iterable[_Raw]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".tsv": _read_tsv,
}


class PromptDealer:
    """Deals the prompts of each rollout, for the whole job: every rank deals the same and takes its share.

    Epoch e is the permutation drawn from ``(seed, e)``. Steps run over epoch ends without loss, so every
    prompt is dealt exactly once per epoch whatever ``per_step`` is, larger than the set included.

    >>> dealer = PromptDealer(load_prompts("prompts.txt"), per_step=8, seed=0)   # doctest: +SKIP
    >>> prompts = next(dealer)                                                   # doctest: +SKIP
    """

    def __init__(self, prompts: PromptSet, per_step: int, seed: int) -> None:
        if per_step < 1:
            raise UserError(f"prompts per step must be at least 1, not {per_step}")
        self.prompts = prompts
        self.per_step = per_step
        self.seed = seed
        self.dealt = 0
        """Prompts dealt since the start of the run; the only state."""

    def __iter__(self) -> "PromptDealer":
        return self

    def __next__(self) -> list[Prompt]:
        """The prompts of the next rollout (P = ``per_step``)."""
        hand: list[Prompt] = []
        while len(hand) < self.per_step:
            epoch, position = divmod(self.dealt, len(self.prompts))
            order = self._order(epoch)[position : position + self.per_step - len(hand)]
            hand += [self.prompts[i] for i in order]
            self.dealt += len(order)
        return hand

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        # A string seed is hashed with SHA-512: the same order everywhere, and no seed + epoch collisions.
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"dealt": self.dealt, "seed": self.seed, "sha256": self.prompts.sha256}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises :class:`UserError` if file or seed differ."""
        if state["sha256"] != self.prompts.sha256:
            raise UserError(
                f"prompt file {self.prompts.path} changed since the checkpoint: restore it or start anew"
            )
        if state["seed"] != self.seed:
            raise UserError(
                f"the checkpoint was dealt with seed {state['seed']}, not {self.seed}: use that seed"
            )
        self.dealt = int(state["dealt"])
