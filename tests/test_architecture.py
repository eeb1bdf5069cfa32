"""The floors of the house, read from the imports, and the promise that no config key is idle.

    4   train        evaluate        probe        doctor       the doors
    3   trainer      build           session      evaluation   results   selfcheck   probing   probe_report   job
                 forecast
    2   rollout      algorithms/     backward/                 these three never import each other
    1   everything else

A room imports from its own floor or below, without circles; a door is imported by nobody.
"""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "jaggrl"
DOORS = {"train", "evaluate", "probe", "doctor"}
MIDDLE = (
    "trainer",
    "build",
    "job",
    "session",
    "forecast",
    "evaluation",
    "results",
    "selfcheck",
    "probing",
    "probe_report",
)
FLOORS = (
    dict.fromkeys(DOORS, 4)
    | dict.fromkeys(MIDDLE, 3)
    | dict.fromkeys(("rollout", "algorithms", "backward"), 2)
)
APART = {"rollout", "algorithms", "backward"}
BACKBONES = {"diffusers", "transformers", "open_clip", "peft"}  # what only models/ and rewards/ may know
NAMED = {"strategies", "weights", "catalogue"}  # maps from names that a user may choose
SEAM = {"backward", "window", "errors", "infra"}  # all that a backward strategy may see


def name_of(path: Path) -> str:
    """``jaggrl/infra/cli.py`` -> ``jaggrl.infra.cli``."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module: str) -> frozenset[str]:
    """Modules that a module imports anywhere in its file; ``from package import module`` names the module."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in whole}
    return frozenset(found)


def room(module: str) -> str:
    """First level below the package: ``infra`` of ``jaggrl.infra.cli``."""
    return [*module.split("."), "jaggrl"][1]


def edges() -> Iterator[tuple[str, str]]:
    """Every import from one of our modules of another."""
    for module in MODULES:
        yield from ((module, target) for target in imports(module) if target in MODULES)


def floor(module: str) -> int:
    return FLOORS.get(room(module), 1)


def test_imports_go_downward_only() -> None:
    upward = [f"{a} (floor {floor(a)}) -> {b} (floor {floor(b)})" for a, b in edges() if floor(b) > floor(a)]
    assert not upward


def test_rollout_algorithms_and_backward_are_apart() -> None:
    rooms = [(a, b) for a, b in edges() if {room(a), room(b)} <= APART and room(a) != room(b)]
    assert not rooms


def test_nobody_imports_a_door() -> None:
    assert not [(a, b) for a, b in edges() if room(b) in DOORS]


def test_backward_strategies_see_the_seam_only() -> None:
    assert not [(a, b) for a, b in edges() if room(a) == "backward" and room(b) not in SEAM]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A path that comes back to its start, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        found = next((c for target in sorted(graph.get(node, ())) if (c := visit(target, [*path, node]))), [])
        done.add(node)
        return found

    return next((c for node in graph if (c := visit(node, []))), [])


@pytest.mark.parametrize("level", ["modules", "rooms"])
def test_no_circles(level: str) -> None:
    graph: dict[str, set[str]] = {}
    for a, b in edges():
        start, end = (a, b) if level == "modules" else (room(a), room(b))
        if start != end:
            graph.setdefault(start, set()).add(end)
    assert not circle(graph)


def test_circle_is_found_where_there_is_one() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_only_models_and_rewards_know_the_big_libraries() -> None:
    outside = {m for m in MODULES if room(m) not in ("models", "rewards")}
    assert not {m: names for m in outside if (names := {i.split(".")[0] for i in imports(m)} & BACKBONES)}


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    installed = packages_distributions()
    missing = {}
    for module in MODULES:
        for top in {name.split(".")[0] for name in imports(module)} - {"jaggrl"} - sys.stdlib_module_names:
            owners = {canonicalize_name(owner) for owner in installed.get(top, [top])}
            if not owners & declared:
                missing[module] = top
    assert not missing


def test_every_module_and_its_tests_have_a_docstring() -> None:
    files = [
        *PACKAGE.rglob("*.py"),
        *(REPOSITORY / "scripts").rglob("*.py"),
        *Path(__file__).parent.rglob("*.py"),
    ]
    silent = [
        str(f) for f in files if f.read_text().strip() and not ast.get_docstring(ast.parse(f.read_text()))
    ]
    assert not silent


def config_keys() -> dict[str, str]:
    """Every key of ``conf/`` but Hydra's own, with a file that has it."""

    def walk(node: object) -> Iterator[str]:
        for key, value in node.items() if isinstance(node, dict) else ():
            yield str(key)
            named = key in NAMED and isinstance(value, dict)
            for child in value.values() if named else (value,):
                yield from walk(child)
        for value in node if isinstance(node, list) else ():
            yield from walk(value)

    keys = {}
    for file in sorted((REPOSITORY / "conf").rglob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(file))
        if isinstance(content, dict) and "hydra" not in file.relative_to(REPOSITORY / "conf").parts:
            content.pop("defaults", None)
            content.pop("hydra", None)
            keys |= dict.fromkeys(walk(content), str(file.relative_to(REPOSITORY)))
    return {key: file for key, file in keys.items() if key.isidentifier() and not key.startswith("_")}


def test_every_config_key_is_read_somewhere() -> None:
    """As a name or string in the package (parameters of ``_target_`` classes included), or by another config."""
    told = " ".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    configs = " ".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "conf").rglob("*.yaml"))
    told += " ".join(re.findall(r"\$\{[^}]*\}", configs))
    words = set(re.findall(r"\w+", told))
    for target in re.findall(r"_target_: ([\w.]+)", configs):
        if not target.startswith(("jaggrl.", "hydra_plugins.")):  # a library's class, such as an optimizer
            words |= set(inspect.signature(get_object(target)).parameters)
    assert not {key: file for key, file in config_keys().items() if key not in words}
