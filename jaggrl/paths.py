"""Paths as configs write them: relative to the launch directory, or inside an installed package."""

from importlib.util import find_spec
from pathlib import Path

from jaggrl.errors import UserError

PACKAGE_PREFIX = "package://"


def resolve_path(path: str | Path) -> Path:
    """Absolute path of a config's path string; the file itself need not exist.

    >>> resolve_path("package://jaggrl/shapes/prompts/train.txt")   # doctest: +SKIP
    PosixPath('.../jaggrl/shapes/prompts/train.txt')

    ``package://<package>/<rest>`` points into an installed package, ``~`` is the home directory, and anything
    else is taken relative to the directory the command was launched from. Raises :class:`UserError` for an
    empty path or a package that is not installed.
    """
    text = str(path)
    if not text.strip():
        raise UserError("an empty path was given: name a file, or package://jaggrl/...")
    if not text.startswith(PACKAGE_PREFIX):
        return Path(text).expanduser().absolute()
    package, _, rest = text.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"path {text!r}: there is no installed package {package!r}; write package://jaggrl/..."
        )
    return Path(spec.submodule_search_locations[0]).absolute() / rest
