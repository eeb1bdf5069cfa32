"""What is ready on this machine and what is missing: ``python -m jaggrl.doctor [scorers] [key=value ...]``.

One line per library and per reward, with the exact file to fetch; nothing is downloaded, nothing is loaded.
Without arguments every set of ``conf/scorers`` is listed, and the exit code is about the libraries and the
shapes world's own scorers. ``python -m jaggrl.doctor published`` asks about the published ones, and
``python -m jaggrl.doctor published dir=/data/ckpts`` looks for them elsewhere. Exit code 0: ready, 1:
something is missing, 2: bad arguments.
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from jaggrl.errors import EXIT_BAD_INPUT, EXIT_OK, UserError, unknown
from jaggrl.infra.environment import REPOSITORY
from jaggrl.rewards.catalogue import missing_files

EXIT_MISSING = 1
CONF = REPOSITORY / "conf"
REQUIRED = "shapes"
"""The set of scorers that everybody needs; the others are optional."""

Finding = tuple[str, str]
"""A name, and what it lacks ("" if it is ready)."""


def libraries() -> Iterator[Finding]:
    """Every dependency that pyproject.toml names, against what is installed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in project["dependencies"]:
        requirement = Requirement(line)
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield requirement.name, f"not installed: pip install '{line}'"
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        yield f"{requirement.name} {found}", "" if fits else f"too old: pip install '{line}'"


def rewards(scorers: str, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Every reward that a set of ``conf/scorers`` evaluates, against the files on this machine."""
    config = _config(scorers, overrides)
    for name in config["eval"]:
        try:
            yield name, "; ".join(missing_files([name], config["catalogue"]))
        except UserError as error:
            yield name, str(error)


def scorer_sets() -> list[str]:
    """The choices of ``scorers``, the required one first."""
    names = sorted(file.stem for file in (CONF / "scorers").glob("*.yaml"))
    return sorted(names, key=lambda name: name != REQUIRED)


def _config(scorers: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The reward config of a set as plain data."""
    if scorers not in scorer_sets():
        raise unknown("scorers", scorers, scorer_sets())
    changes = [f"model.scorers.{override}" for override in overrides]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose(overrides=[f"+scorers@model.scorers={scorers}", "+reward=base", *changes])
        return dict(OmegaConf.to_container(config.reward, resolve=True))  # type: ignore[arg-type]
    except HydraException as error:
        reason = " ".join(str(error).split())
        remedy = f"see conf/scorers/{scorers}.yaml for the keys"
        raise UserError(f"{' '.join(overrides)}: {reason}; {remedy}") from error


def report(title: str, findings: Iterable[Finding]) -> bool:
    """Print one line per finding; whether all are ready."""
    print(title)
    ready = True
    for name, lack in findings:
        print(f"  {name:<32} {'missing: ' + lack if lack else 'ready'}", flush=True)
        ready &= not lack
    return ready


def run(arguments: Sequence[str]) -> int:
    """Print the report and return the exit code."""
    names = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if len(names) > 1 or (overrides and not names):
        raise UserError(f"doctor takes one of {', '.join(scorer_sets())}, then key=value of that set")
    found = {scorers: list(rewards(scorers, overrides)) for scorers in names or scorer_sets()}
    ready = report("libraries", libraries())
    for scorers, findings in found.items():
        optional = not names and scorers != REQUIRED
        title = f"rewards of scorers={scorers}" + (" (optional)" if optional else "")
        ready &= report(title, findings) or optional
    return EXIT_OK if ready else EXIT_MISSING


def main() -> None:
    """The door."""
    try:
        sys.exit(run(sys.argv[1:]))
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
