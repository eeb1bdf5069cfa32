"""What plain YAML cannot say of an override: its kind of value, and which keys anything reads."""

import inspect
from collections.abc import Sequence

from hydra.core.override_parser.types import Override, OverrideType
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from jaggrl.errors import UserError
from jaggrl.infra.overrides import choices, chosen, closest_key, compose_groups, keys, names, place

OPEN = ("hydra", "model", "reward", "strategies")
"""Sections where a user may give and take names: scorers, rewards, strategies."""


def check_keys(name: str, parsed: Sequence[Override]) -> None:
    """Refuse an added key that nothing reads and a deleted one that something needs.

    What is built from a ``_target_`` refuses unknown arguments itself, and has defaults for missing ones.
    """
    edits = [o for o in parsed if (o.is_add() or o.is_force_add() or o.is_delete()) and not chosen(o)]
    base = compose_groups(name, parsed) if edits else None
    if base is None:
        return
    known = set(keys(base))
    for override in edits:
        key = place(override).partition("@")[2] or place(override).replace("/", ".")
        if (key in known) is not override.is_delete() or _is_open(key, base):
            continue
        if override.is_delete():
            raise UserError(f"~{key}: the run needs it; give it another value instead of deleting it")
        raise UserError(f"+{key}: nothing reads it; {closest_key(key, base)}")


def _is_open(key: str, base: DictConfig) -> bool:
    """Whether a key lies in an open section or in what a ``_target_`` builds."""
    parts = key.split(".")
    above = [
        OmegaConf.select(base, ".".join(parts[:n]), throw_on_missing=False) for n in range(1, len(parts))
    ]
    return parts[0] in OPEN or any(OmegaConf.is_dict(node) and "_target_" in node for node in above)


def check_kinds(name: str, parsed: Sequence[Override]) -> None:
    """Refuse a word where the config has a number or a switch, and one value where it has several."""
    plain = [o for o in parsed if _is_plain_key(o) and o.value() is not None and "${" not in str(o.value())]
    base = compose_groups(name, parsed) if plain else None
    if base is None:
        return
    for override in plain:
        key, value = override.key_or_group, override.value()
        default = OmegaConf.select(base, key, throw_on_missing=False)
        if OmegaConf.is_dict(default) and not isinstance(value, dict):
            told = "must be an object, as in {_target_: package.Class}"
            raise UserError(
                f"{key}={value}: {told if '_target_' in default else 'has keys; ' + names(default)}"
            )
        if OmegaConf.is_list(default) and not isinstance(value, list):
            raise UserError(f"{key}={value}: must be a list, as in {key}=[{value}]")
        number = isinstance(default, bool | int | float) and isinstance(value, str)
        if number and not _takes_words(base, key):
            kind = "true or false" if isinstance(default, bool) else "a number"
            raise UserError(f"{key}={value}: must be {kind} (the default is {default})")


def _takes_words(base: DictConfig, key: str) -> bool:
    """Whether the class that gets this value declares that it also takes strings (``size: int | str``)."""
    parent, _, leaf = key.rpartition(".")
    target = OmegaConf.select(base, f"{parent}._target_") if parent else None
    if target is None:
        return False
    parameter = inspect.signature(get_object(target)).parameters.get(leaf)
    return parameter is None or "str" in str(parameter.annotation)


def _is_plain_key(override: Override) -> bool:
    """``key=value`` of an existing key: not a group, not added, not deleted."""
    return override.type == OverrideType.CHANGE and not choices(override.key_or_group)
