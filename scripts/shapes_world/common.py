"""What every stage shares: the run's settings, progress lines, cached pictures, cards, atomic folders."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from jaggrl.shapes.captions import captions, split_specs
from jaggrl.shapes.render import QUALITIES, draw
from jaggrl.shapes.scene import CATEGORIES, SIZE, sample_scene


@dataclass(frozen=True)
class Build:
    """Settings of one build: `out` gets the weights, `work` the caches, pictures and logs."""

    out: Path
    work: Path
    seed: int
    threads: int
    flux_steps: int
    flux_minutes: float


@dataclass(frozen=True)
class Pool:
    """Rendered pictures, [N, SIZE, SIZE, 3] uint8, with their captions."""

    images: NDArray[np.uint8]
    texts: list[str]

    def tensor(self, index: torch.Tensor) -> torch.Tensor:
        """Pictures as a float tensor [B, 3, SIZE, SIZE] in [-1, 1]."""
        batch = torch.from_numpy(self.images[index.numpy()])
        return batch.permute(0, 3, 1, 2).float() / 127.5 - 1.0


class Progress:
    """Prints a line with time spent and left, at most every `every` seconds."""

    def __init__(self, name: str, every: float = 20.0) -> None:
        self.name, self.every = name, every
        self.start = self.last = time.monotonic()

    def minutes(self) -> float:
        """Minutes since the start."""
        return (time.monotonic() - self.start) / 60.0

    def show(self, done: float, text: str) -> None:
        """Report `done` in (0, 1], with a text."""
        now = time.monotonic()
        if now - self.last < self.every and done < 1.0:
            return
        self.last = now
        left = (now - self.start) * (1.0 - done) / max(done, 1e-6) / 60.0
        print(
            f"[{self.name}] {100 * done:5.1f} %  {self.minutes():5.1f} min, {left:5.1f} min left  {text}",
            flush=True,
        )


def seeded(build: Build, stage: str) -> np.random.Generator:
    """Seed torch for a stage and give its numpy generator: stages do not depend on which others ran."""
    number = int.from_bytes(hashlib.sha256(f"{build.seed}/{stage}".encode()).digest()[:4], "little")
    torch.manual_seed(number)
    return np.random.default_rng(number)


def picture_pool(build: Build, name: str, count: int, split: str = "train") -> Pool:
    """`count` pictures of a split, categories balanced, half of them degraded; cached in the work folder."""
    path = build.work / f"pool_{name}_{split}_{count}_{build.seed}.npz"
    if path.exists():
        stored = np.load(path)
        return Pool(stored["images"], [str(text) for text in stored["texts"]])
    rng = seeded(build, f"pool/{name}/{split}")
    by_category = split_specs(split)
    images = np.empty((count, SIZE, SIZE, 3), np.uint8)
    texts = []
    progress = Progress(f"pictures {name}")
    for i in range(count):
        found = by_category[CATEGORIES[i % len(CATEGORIES)]]
        spec = found[rng.integers(len(found))]
        quality = QUALITIES[(i // len(CATEGORIES)) % 2]
        images[i] = np.round(255.0 * draw(sample_scene(spec, rng), quality, rng))
        texts.append(str(rng.choice(captions(spec))))
        progress.show((i + 1) / count, f"{i + 1} drawn")
    np.savez(path, images=images, texts=np.asarray(texts))
    return Pool(images, texts)


def parameters(*modules: torch.nn.Module) -> int:
    """Number of parameters of some modules together."""
    return sum(p.numel() for module in modules for p in module.parameters())


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a fresh folder, then put it in the place of `target` by renames."""
    fresh, old = (target.parent / f".{target.name}-{word}-{os.getpid()}" for word in ("new", "old"))
    for folder in (fresh, old):
        shutil.rmtree(folder, ignore_errors=True)
    fresh.mkdir(parents=True)
    write(fresh)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def write_card(folder: Path, title: str, facts: dict[str, object]) -> None:
    """Write `card.json` (facts, SHA-256 of every weight file) and a short `README.md` of the same."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".safetensors", ".pt"):
            hashes[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    card = {"title": title, **facts, "sha256": hashes}
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    lines = [
        f"# {title}",
        "",
        "Trained from nothing by `scripts/build_shapes_world.py`; the facts are in `card.json`.",
        "",
    ]
    for key, value in facts.items():
        lines.append(f"- **{key}**: {json.dumps(value) if isinstance(value, dict) else value}")
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
