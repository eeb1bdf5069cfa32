"""From a config's catalogue of rewards (``reward.catalogue``) to objects.

A catalogue maps names to ``_target_`` and arguments, as plain data:
``OmegaConf.to_container(cfg.reward.catalogue, resolve=True)``.
"""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from jaggrl.errors import UserError, unknown
from jaggrl.rewards.base import Reward

Catalogue = Mapping[str, Mapping[str, Any]]


def build_rewards(
    catalogue: Catalogue, names: Iterable[str], device: str | torch.device = "cpu"
) -> dict[str, Reward]:
    """The named rewards, loaded and frozen on ``device``; see :func:`missing_files` for what is refused."""
    names = list(dict.fromkeys(names))
    lacks = missing_files(names, catalogue)
    if lacks:
        raise UserError("; ".join(lacks))
    return {name: _target(name, catalogue)(**_arguments(name, catalogue), device=device) for name in names}


def missing_files(names: Iterable[str], catalogue: Catalogue) -> list[str]:
    """What the named rewards lack on this machine, all of it at once, each with how to get it.

    Loads no weights. Raises :class:`UserError` for an unknown name, a class that cannot be imported, and
    arguments that the class does not take.
    """
    lacks: list[str] = []
    for name in dict.fromkeys(names):
        target, arguments = _target(name, catalogue), _arguments(name, catalogue)
        try:
            inspect.signature(target).bind(**arguments, device="cpu")
        except TypeError as error:
            keys = ", ".join(inspect.signature(target).parameters)
            raise UserError(f"reward {name!r}: {error}; {target.__name__} takes {keys}") from error
        lacks += target.missing(arguments)
    return list(dict.fromkeys(lacks))


def _target(name: str, catalogue: Catalogue) -> Any:
    if name not in catalogue:
        raise unknown("reward", name, catalogue)
    path = str(catalogue[name].get("_target_", ""))
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"reward {name!r}: cannot import {path!r} ({error}): install or correct it"
        ) from error


def _arguments(name: str, catalogue: Catalogue) -> dict[str, Any]:
    return {str(key): value for key, value in catalogue[name].items() if key != "_target_"}
