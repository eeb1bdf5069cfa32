"""What a run was made with: package versions, git commit, a hash of the code."""

import hashlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jaggrl

PACKAGE = Path(jaggrl.__file__).parent
REPOSITORY = PACKAGE.parent

# What decides numbers; the full list stands in constraints.txt.
TOLD = ("torch", "torchvision", "numpy", "diffusers", "transformers", "peft", "open_clip_torch", "hydra-core")


def code_hash() -> str:
    """Hash of the package's Python files by path and content: another hash, another program."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def git_commit() -> str | None:
    """Commit of the package's checkout, ``+changes`` when tracked files differ; None outside git."""
    if not (REPOSITORY / ".git").exists():  # another repository around an installed copy is not ours
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Version of Python, of jaggrl and of the packages that decide numbers."""
    found = {"python": platform.python_version(), "jaggrl": jaggrl.__version__}
    for name in TOLD:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def describe_environment() -> str:
    """Text of ``env.txt``: command, commit, code hash, platform, versions."""
    rows = {
        "command": " ".join(sys.argv),
        "git": git_commit() or "none",
        "code": code_hash(),
        "platform": platform.platform(),
        **versions(),
    }
    return "".join(f"{key}: {value}\n" for key, value in rows.items())
