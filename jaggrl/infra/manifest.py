"""A folder's table of contents: every file with size and hash, so that a broken one is found before use."""

import hashlib
from pathlib import Path
from typing import Any

from jaggrl.infra.files import read_json, write_json

MANIFEST = "manifest.json"
HASHED_END = 64 << 20  # bytes; of a larger file only the first and last so many are hashed


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Write ``facts`` and the size and hash of every file under ``folder`` into its manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {path.relative_to(folder).as_posix(): _fingerprint(path) for path in files}
    write_json(folder / MANIFEST, facts | {"files": listed})


def find_problem(folder: Path) -> str | None:
    """What is wrong with the files of ``folder``, compared with its manifest; None when all are whole."""
    manifest = read_json(folder / MANIFEST)
    if manifest is None or "files" not in manifest:
        return f"no readable {MANIFEST}"
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if _fingerprint(file) != expected:
            return f"{name} has changed"
    return None


def _fingerprint(path: Path) -> dict[str, Any]:
    """Size and sha256; of a large file the hash of its two ends (kills and full disks truncate)."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(HASHED_END))
        if size > HASHED_END:
            file.seek(max(HASHED_END, size - HASHED_END))
            digest.update(file.read())
    return {"bytes": size, "sha256": digest.hexdigest()}
