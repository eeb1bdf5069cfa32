"""A look at the command line before Hydra's: what is wrong in one line, with the closest name.

The config is composed exactly as Hydra will compose it. Only when that fails do we look for the override to
blame, so the check can never refuse what Hydra accepts, with two exceptions, because plain YAML has no types: a
word where the config has a number (or one value where it has several), and a key added that nothing reads or
deleted that something needs.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from jaggrl.errors import UserError, unknown
from jaggrl.infra.override_checks import check_keys, check_kinds
from jaggrl.infra.overrides import (
    COMPOSE_ERRORS,
    choices,
    chosen,
    closest_key,
    compose_groups,
    keys,
    line,
    parse,
    place,
)


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
        parsed = [parse(text) for text in overrides]
        for job in _jobs(parsed, sweep):
            _check(name, job)


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
    parsed = [parse(text) for text in overrides]
    check_keys(name, parsed)
    HydraConfig.instance().set_config(cfg)
    try:
        task = copy.deepcopy(cfg)
        with open_dict(task):
            del task["hydra"]
        for key in _missing(OmegaConf.to_container(task)):
            raise UserError(f"config key {key!r} has no value: give {key}=...")
        OmegaConf.to_container(task, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"config key {error.full_key!r}: {line(error)}") from error
    finally:
        HydraConfig.instance().cfg = None
    check_kinds(name, parsed)


def _diagnose(name: str, overrides: Sequence[str], error: Exception) -> UserError:
    """Find what Hydra stumbled over: a choice, a key, else its own words in one line."""
    parsed = [parse(text) for text in overrides]
    for override in parsed:
        for choice in chosen(override):
            group, _, last = f"{override.key_or_group}/{choice}".rpartition("/")
            if last not in choices(group):
                return unknown(override.key_or_group, choice, choices(override.key_or_group))
    base = compose_groups(name, parsed)
    if base is None:
        return _idle_group(name, parsed) or UserError(line(error))
    for override in parsed:
        key = override.key_or_group
        if override.is_add() or override.is_force_add() or place(override) in base.hydra.runtime.choices:
            continue  # such as experiment=..., a group without a key of its own
        if OmegaConf.select(base, key) is None and key not in set(keys(base)):
            return UserError(f"unknown config key {key!r}: {closest_key(key, base)}")
    return UserError(line(error))


def _idle_group(name: str, parsed: Sequence[Override]) -> UserError | None:
    """A choice in a group that the config does not use, or uses in another place (``group@package``)."""
    plain = compose_groups(name, [])
    used = [] if plain is None else [str(place) for place in plain.hydra.runtime.choices]
    for override in parsed:
        added = override.is_add() or override.is_force_add()
        if plain is None or added or not chosen(override) or place(override) in used:
            continue
        group, value = override.key_or_group, override.value()
        places = [f"here it is {place}={value}" for place in used if place.partition("@")[0] == group]
        remedy = places[0] if places else f"add it with +{override.input_line}"
        return UserError(f"group {group!r} is not used by {name}.yaml: {remedy}")
    return None


def _missing(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the values that a config leaves to the user."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _missing(value, f"{prefix}.{key}" if prefix else str(key))
    elif node == "???":
        yield prefix
