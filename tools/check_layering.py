"""Checks who includes whom. Usage: python tools/check_layering.py [root].

Data flows forward -> select -> schedule -> backward, and includes follow:

    include/backlite   the standard library alone
    src/common         the public headers; sm90/tensor_map.h, for common/copy_engine.h
    src/sm90           nothing of ours
    src/<stage>        common, sm90, the public headers, its own folder
    src/backward       also schedule/layout*.h, which say what a schedule looks like
    src/api            the stages, common, the public headers
    src/binding        the public headers; the one place that knows the Python world
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from repo_files import list_files, report

STAGES = ("forward", "select", "schedule", "backward")
PUBLIC = "backlite"

# layer -> the folders that it may include from.
ALLOWED = {
    PUBLIC: {PUBLIC},
    "common": {"common", PUBLIC},
    "sm90": {"sm90"},
    **{stage: {stage, "common", "sm90", PUBLIC} for stage in STAGES},
    "api": {"api", "common", PUBLIC, *STAGES},
    "binding": {"binding", PUBLIC},
}
ALLOWED_FILES = {
    "common": {"sm90/tensor_map.h"},
    "backward": {"schedule/layout.h", "schedule/layout_sm90.h"},
}

# Headers of a framework or of Python, which only the binding may know.
FRAMEWORK = re.compile(r"^(tvm|dlpack|torch|ATen|c10|pybind11)/|^Python\.h$")
# Headers of CUDA, which the public headers must not need.
CUDA = re.compile(r"^(cuda|cute/|cutlass/|cub/|thrust/)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inl"}


def layer_of(path: Path) -> str | None:
    """The layer of a source file, None if layering does not bind it."""
    if path.parts[:2] == ("include", PUBLIC):
        return PUBLIC
    if path.parts[0] == "src":
        return path.parts[1] if len(path.parts) > 2 else ""
    return None


def check_include(layer: str, target: str, is_quoted: bool) -> str | None:
    """Why `layer` must not include `target`, or None if it may."""
    if FRAMEWORK.search(target) and layer != "binding":
        return "only src/binding may know a framework"
    if layer == PUBLIC and CUDA.search(target):
        return "the public headers must not need CUDA"
    folder, _, rest = target.partition("/")
    is_ours = folder in ALLOWED and rest
    if not is_ours:
        return "our headers are included with their folder" if is_quoted else None
    if folder in ALLOWED[layer] or target in ALLOWED_FILES.get(layer, set()):
        return None
    return f"{layer} may include from: {', '.join(sorted(ALLOWED[layer]))}"


def main() -> int:
    """Check every file of the repository that the command line names."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    problems = []
    num_includes = 0
    for path in list_files(root):
        layer = layer_of(path)
        if path.suffix not in SUFFIXES or layer is None:
            continue
        if layer not in ALLOWED:
            problems.append(f"{path}: no such layer; known are: {', '.join(ALLOWED)}")
            continue
        for number, line in enumerate((root / path).read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match is None:
                continue
            num_includes += 1
            reason = check_include(layer, match[2], match[1] == '"')
            if reason is not None:
                problems.append(f"{path}:{number}: includes {match[2]}: {reason}")
    return report(problems, f"layering: {num_includes} includes follow the layers")


if __name__ == "__main__":
    sys.exit(main())
