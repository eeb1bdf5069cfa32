"""Small files that are either whole or not there: write to a temporary name, fsync, rename."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` such that a reader, or a kill in the middle, finds the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    """:func:`write_atomic` of ``content`` as indented JSON; ValueError for non-finite numbers (not JSON)."""
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object stored at ``path``; None when the file is missing, broken or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def fsync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` survive a power cut (a rename lives in the folder, not in the file)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
