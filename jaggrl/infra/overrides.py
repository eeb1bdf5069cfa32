"""Reading the command line's overrides: what each is about, and the config without them."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from jaggrl.errors import UserError, did_you_mean

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)


def parse(text: str) -> Override:
    """One override as Hydra reads it; what it cannot read is one line."""
    loader = GlobalHydra.instance().config_loader()
    try:
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except HydraException as error:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"cannot read {text!r}: write key=value, or group=choice") from error
        raise UserError(
            f"cannot read {text!r}: {line(error)}; quote special characters: 'key=\"a,b\"'"
        ) from error


def place(override: Override) -> str:
    """``group``, ``group@package`` or key that an override is about."""
    return str(override.get_key_element()).lstrip("~+")


def compose_groups(name: str, parsed: Sequence[Override]) -> DictConfig | None:
    """The config with the chosen groups but without the single keys; None when that fails too."""
    try:
        return compose(name, [str(o.input_line) for o in parsed if chosen(o)], return_hydra_config=True)
    except COMPOSE_ERRORS:
        return None


def chosen(override: Override) -> list[str]:
    """The choices an override makes in a config group; empty for a key and for a deletion."""
    value = None if override.is_delete() else override.value()
    if value is None or not choices(override.key_or_group):
        return []
    return [str(choice) for choice in (value if isinstance(value, list) else [value])]


def choices(group: str) -> list[str]:
    """The files of a config group; empty for what is none."""
    return GlobalHydra.instance().config_loader().get_group_options(group)


def keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of every node and leaf."""
    if OmegaConf.is_dict(node):
        for key in node:
            name = f"{prefix}.{key}" if prefix else str(key)
            yield name
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                yield from keys(node[key], name)


def names(node: Any) -> str:
    """``choose one of: ...``, of the keys that a user may set."""
    return did_you_mean("", (str(key) for key in node if not str(key).startswith("_")))


def line(error: BaseException) -> str:
    """First telling line of an error and of its cause; for a broken file, where it is broken."""
    if isinstance(error, YAMLError):
        return " ".join(str(error).split())
    cause = error.__cause__ or error.__context__
    texts = [str(e).strip() for e in (error, cause) if e is not None]
    lines = [text.splitlines()[0].strip().rstrip(".") for text in texts if text]
    return ": ".join(dict.fromkeys(lines)) or type(error).__name__


def closest_key(key: str, base: DictConfig) -> str:
    """The most similar key beside it and those of the same name elsewhere; else its neighbours, or any similar key."""
    known = [name for name in keys(base) if key.startswith("hydra") or not name.startswith("hydra")]
    parent, dot, leaf = key.rpartition(".")
    beside = [name for name in known if name.rpartition(".")[0] == parent]
    similar = get_close_matches(key, beside, n=1, cutoff=1 - 0.25 * len(leaf) / len(key))
    elsewhere = [name for name in known if name.rpartition(".")[2] == leaf]
    found = list(dict.fromkeys([*similar, *elsewhere]))
    if not found and not (dot and beside):
        groups = GlobalHydra.instance().config_loader().list_groups("")
        found = get_close_matches(key, [*known, *groups], n=1, cutoff=0.75)
    if found:
        return "did you mean " + " or ".join(map(repr, found[:3])) + "?"
    node = OmegaConf.select(base, parent) if dot else None
    return names(node) if OmegaConf.is_dict(node) else "--cfg job shows all keys"
