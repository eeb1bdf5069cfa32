"""Loading pipeline folders with errors that say what to do."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from jaggrl.errors import UserError
from jaggrl.paths import resolve_path


def locate_pipeline(path: str) -> str:
    """The folder of ``path`` if it is one on disk (checked to hold a pipeline), else ``path`` as a hub id.

    Called when the config is checked, before anything heavy is imported.
    """
    folder = resolve_path(path)
    if folder.exists():
        if not (folder / "model_index.json").is_file():
            raise UserError(
                f"model.path={path}: {folder} holds no model_index.json; give a diffusers pipeline folder"
            )
        return str(folder)
    looks_local = path.startswith((".", "/", "~", "package://")) or path.count("/") != 1
    if looks_local:
        raise UserError(
            f"model.path={path}: no folder {folder}; give a diffusers pipeline folder or a hub id"
        )
    return path


@contextmanager
def _quietly() -> Iterator[None]:
    """Without two libraries' bars, nor the remark that newer diffusers call ``torch_dtype`` ``dtype``."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch_dtype.*")
        yield


def load_pipeline(pipeline_class: Any, path: str) -> Any:
    """``pipeline_class.from_pretrained`` in fp32; a missing, foreign or broken folder is one line."""
    location = locate_pipeline(path)
    try:
        with _quietly():
            pipeline = pipeline_class.from_pretrained(location, torch_dtype=torch.float32)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "fetch it again" if Path(location).is_dir() else "download it first (hf download)"
        raise UserError(
            f"model.path={path} cannot be loaded as {pipeline_class.__name__}: {first}; {hint}"
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
