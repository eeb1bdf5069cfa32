"""A look at the command line before Hydra's: what is wrong in one line, with the closest name.

The config is composed exactly as Hydra will compose it. Only when that fails do we look for the override to
blame, so the check can never refuse what Hydra accepts, with one exception: a word where the config has a
number, or one value where it has several, is refused here, because plain YAML has no types.
"""

import copy
import inspect
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from jaggrl.errors import UserError, did_you_mean, unknown

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)


def precheck(argv: Sequence[str], config_name: str, conf: Path) -> None:
    """Compose every job of this command line without running it.

    Args:
        argv: arguments after the program's name.
        config_name: primary config, ``train``.
        conf: folder of configs.

    Raises:
        UserError: a misspelt key, group or choice, a sweep without ``-m``, a missing value, a broken file.
    """
    args = get_args_parser().parse_args(list(argv))
    if args.help or args.hydra_help or args.shell_completion or args.info or args.experimental_rerun:
        return
    conf = Path(args.config_path) if args.config_path else conf
    name = args.config_name or config_name
    if not conf.is_dir():
        raise UserError(
            f"config folder {conf} is missing: run from a checkout of the repository, or --config-path"
        )
    if not args.config_dir and not (conf / f"{name}.yaml").is_file():
        raise unknown("config", name, (path.stem for path in conf.glob("*.yaml")))
    overrides = list(args.overrides)
    if args.config_dir:
        overrides.append(f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]")
    sweep = args.multirun or "hydra.mode=MULTIRUN" in overrides
    if sweep and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "-m under torchrun: start the sweep plainly, with hydra.launcher.nproc=<ranks per job>"
        )
    with initialize_config_dir(str(conf.absolute()), job_name=name, version_base="1.3"):
        parsed = [_parse(text) for text in overrides]
        for job in _jobs(parsed, sweep):
            _check(name, job)


def _parse(text: str) -> Override:
    loader = GlobalHydra.instance().config_loader()
    try:
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except HydraException as error:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"cannot read {text!r}: write key=value, or group=choice") from error
        raise UserError(
            f"cannot read {text!r}: {_line(error)}; quote special characters: 'key=\"a,b\"'"
        ) from error


def _jobs(parsed: Sequence[Override], sweep: bool) -> Iterator[list[str]]:
    """Override lists that together touch every swept choice: the first job, then one change at a time."""
    first = [str(override.input_line) for override in parsed]
    swept: list[tuple[int, list[str]]] = []
    for index, override in enumerate(parsed):
        if not override.is_sweep_override():
            continue
        if not sweep:
            raise UserError(
                f"{override.input_line!r} has several values: add -m for one run each, or write a list [a,b]"
            )
        key = override.get_key_element()
        choices = [f"{key}={value}" for value in override.sweep_string_iterator()]
        if not choices:
            raise UserError(f"{override.input_line!r} matches nothing")
        first[index] = choices[0]
        swept.append((index, choices))
    yield first
    for index, choices in swept:
        for choice in choices[1:]:
            yield [*first[:index], choice, *first[index + 1 :]]


def _check(name: str, overrides: list[str]) -> None:
    try:
        cfg = compose(name, overrides, return_hydra_config=True)
    except COMPOSE_ERRORS as error:
        raise _diagnose(name, overrides, error) from error
    HydraConfig.instance().set_config(cfg)
    try:
        task = copy.deepcopy(cfg)
        with open_dict(task):
            del task["hydra"]
        for key in _missing(OmegaConf.to_container(task)):
            raise UserError(f"config key {key!r} has no value: give {key}=...")
        OmegaConf.to_container(task, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"config key {error.full_key!r}: {_line(error)}") from error
    finally:
        HydraConfig.instance().cfg = None
    _check_kinds(name, overrides)


def _diagnose(name: str, overrides: Sequence[str], error: Exception) -> UserError:
    """Find what Hydra stumbled over: a choice, a key, else its own words in one line."""
    parsed = [_parse(text) for text in overrides]
    for override in parsed:
        for choice in _chosen(override):
            group, _, last = f"{override.key_or_group}/{choice}".rpartition("/")
            if last not in _choices(group):
                return unknown(override.key_or_group, choice, _choices(override.key_or_group))
    base = _compose_groups(name, parsed)
    if base is None:
        return _idle_group(name, parsed) or UserError(_line(error))
    for override in parsed:
        key = override.key_or_group
        if override.is_add() or override.is_force_add() or _place(override) in base.hydra.runtime.choices:
            continue  # such as experiment=..., a group without a key of its own
        if OmegaConf.select(base, key) is None and key not in set(_keys(base)):
            return UserError(f"unknown config key {key!r}: {_closest_key(key, base)}")
    return UserError(_line(error))


def _idle_group(name: str, parsed: Sequence[Override]) -> UserError | None:
    """A choice in a group that the config does not use, or uses in another place (``group@package``)."""
    plain = _compose_groups(name, [])
    used = [] if plain is None else [str(place) for place in plain.hydra.runtime.choices]
    for override in parsed:
        added = override.is_add() or override.is_force_add()
        if plain is None or added or not _chosen(override) or _place(override) in used:
            continue
        group, value = override.key_or_group, override.value()
        places = [f"here it is {place}={value}" for place in used if place.partition("@")[0] == group]
        remedy = places[0] if places else f"add it with +{override.input_line}"
        return UserError(f"group {group!r} is not used by {name}.yaml: {remedy}")
    return None


def _place(override: Override) -> str:
    """``group``, ``group@package`` or key that an override is about."""
    return str(override.get_key_element()).lstrip("~+")


def _check_kinds(name: str, overrides: Sequence[str]) -> None:
    """Refuse a word where the config has a number or a switch, and one value where it has several."""
    parsed = [_parse(text) for text in overrides]
    plain = [o for o in parsed if _is_plain_key(o) and o.value() is not None and "${" not in str(o.value())]
    base = _compose_groups(name, parsed) if plain else None
    if base is None:
        return
    for override in plain:
        key, value = override.key_or_group, override.value()
        default = OmegaConf.select(base, key, throw_on_missing=False)
        if OmegaConf.is_dict(default) and not isinstance(value, dict):
            told = "must be an object, as in {_target_: package.Class}"
            raise UserError(
                f"{key}={value}: {told if '_target_' in default else 'has keys; ' + _names(default)}"
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


def _compose_groups(name: str, parsed: Sequence[Override]) -> DictConfig | None:
    """The config with the chosen groups but without the single keys; None when that fails too."""
    try:
        return compose(name, [str(o.input_line) for o in parsed if _chosen(o)], return_hydra_config=True)
    except COMPOSE_ERRORS:
        return None


def _is_plain_key(override: Override) -> bool:
    """``key=value`` of an existing key: not a group, not added, not deleted."""
    return override.type == OverrideType.CHANGE and not _choices(override.key_or_group)


def _chosen(override: Override) -> list[str]:
    """The choices an override makes in a config group; empty for a key and for a deletion."""
    value = None if override.is_delete() else override.value()
    if value is None or not _choices(override.key_or_group):
        return []
    return [str(choice) for choice in (value if isinstance(value, list) else [value])]


def _choices(group: str) -> list[str]:
    return GlobalHydra.instance().config_loader().get_group_options(group)


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of every node and leaf."""
    if OmegaConf.is_dict(node):
        for key in node:
            name = f"{prefix}.{key}" if prefix else str(key)
            yield name
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                yield from _keys(node[key], name)


def _missing(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the values that a config leaves to the user."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _missing(value, f"{prefix}.{key}" if prefix else str(key))
    elif node == "???":
        yield prefix


def _closest_key(key: str, base: DictConfig) -> str:
    """The most similar key beside it and those of the same name elsewhere; else its neighbours, or any similar key."""
    known = [name for name in _keys(base) if key.startswith("hydra") or not name.startswith("hydra")]
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
    return _names(node) if OmegaConf.is_dict(node) else "--cfg job shows all keys"


def _names(node: Any) -> str:
    """``choose one of: ...``, of the keys that a user may set."""
    return did_you_mean("", (str(key) for key in node if not str(key).startswith("_")))


def _line(error: BaseException) -> str:
    """First telling line of an error and of its cause; for a broken file, where it is broken."""
    if isinstance(error, YAMLError):
        return " ".join(str(error).split())
    cause = error.__cause__ or error.__context__
    texts = [str(e).strip() for e in (error, cause) if e is not None]
    lines = [text.splitlines()[0].strip().rstrip(".") for text in texts if text]
    return ": ".join(dict.fromkeys(lines)) or type(error).__name__
