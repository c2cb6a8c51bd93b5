"""The text files of the checkout, as the checks see them."""

from __future__ import annotations

import subprocess
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
        names = [path.relative_to(root) for path in root.rglob("*")]
    return sorted(
        name for name in names if name.parts[0] not in GENERATED and (root / name).is_file()
    )


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
