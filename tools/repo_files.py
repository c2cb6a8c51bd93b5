"""The files of the checkout, as the checks see them.

Usage: python tools/repo_files.py SUFFIX... prints those with one of the suffixes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What the commands of the Makefile write. The documentation may name it before it exists.
GENERATED = (".venv", "build", "demo", "dist")


def list_files(root: Path) -> list[Path]:
    """Paths relative to `root`: what git tracks or would track; without git, every file."""
    git = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    # A folder inside some other checkout is not one of its own.
    if git.returncode == 0 and (root / ".git").exists():
        names = [Path(line) for line in git.stdout.splitlines()]
    else:
        names = [path.relative_to(root) for path in root.rglob("*") if not is_cache(path, root)]
    return sorted(
        name for name in names if name.parts[0] not in GENERATED and (root / name).is_file()
    )


def is_cache(path: Path, root: Path) -> bool:
    """Whether some tool keeps its own notes here, in a hidden folder or compiled Python."""
    folders = path.relative_to(root).parts[:-1]
    return any(name == "__pycache__" or name.startswith(".") for name in folders)


def read_text(path: Path) -> str | None:
    """The file's text, or None if it is not UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def report(problems: list[str], passed: str) -> int:
    """Prints the problems, or `passed` if there are none. Returns the exit status."""
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problem(s)" if problems else passed)
    return 1 if problems else 0


if __name__ == "__main__":
    for file in list_files(Path.cwd()):
        if file.suffix in sys.argv[1:]:
            print(file)
