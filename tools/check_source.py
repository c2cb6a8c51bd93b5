"""Checks of source text that no other tool makes. Usage: python tools/check_source.py [root].

* no commented-out C++ or CUDA: a comment line that ends like code (`;`, `{` or `}`)
* no file under src/ or include/ of 500 lines or more: kernels and their twins are read in one go
* no C++ line over 100 columns (clang-format leaves comments alone)
* no absolute path of somebody's machine, in any text file
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from repo_files import list_files, read_text, report

MAX_LINES = 500
MAX_COLUMNS = 100
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inl"}

# The whole line is a comment: after code, a `//` may be part of a string.
COMMENT_LIKE_CODE = re.compile(r"^\s*//.*[;{}]\s*$")
# A semicolon may end a line of prose, which has words that code has not.
PROSE = re.compile(r"\b(?:a|an|are|at|by|is|it|its|no|of|so|than|that|the|to|which|with)\b")
# Home folders and the usual places of checkouts. A leading word character or dot means that the
# path is a relative one.
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|Users|work|workspace|tmp|mnt|opt|data)/\w")


def check_file(path: Path, text: str) -> list[str]:
    """List the faults of one text file; `path` is relative to the root."""
    problems = []
    lines = text.splitlines()
    is_cpp = path.suffix in CPP_SUFFIXES
    if is_cpp and path.parts[0] in ("src", "include") and len(lines) >= MAX_LINES:
        problems.append(f"{path}: {len(lines)} lines; fewer than {MAX_LINES} are accepted")
    for number, line in enumerate(lines, 1):
        if is_cpp and COMMENT_LIKE_CODE.match(line) and not PROSE.search(line):
            problems.append(f"{path}:{number}: a comment that ends like code: {line.strip()}")
        if is_cpp and len(line) > MAX_COLUMNS:
            problems.append(f"{path}:{number}: {len(line)} columns; {MAX_COLUMNS} are accepted")
        if MACHINE_PATH.search(line):
            problems.append(f"{path}:{number}: an absolute machine path: {line.strip()}")
    return problems


def main() -> int:
    """Check every file of the repository that the command line names."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    problems = []
    num_files = 0
    for path in list_files(root):
        text = read_text(root / path)
        if text is None:
            continue
        num_files += 1
        problems += check_file(path, text)
    return report(problems, f"source: {num_files} text files are clean")


if __name__ == "__main__":
    sys.exit(main())
