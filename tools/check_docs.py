"""Checks that what the documentation names exists. Usage: python tools/check_docs.py [root].

In every *.md:

* links and images lead to a file, and anchors to a heading
* paths in `code` exist (from the root, the document's folder, or an include or import root)
* commands in ```bash blocks, and in `code` that starts like one, exist: make targets,
  `python -m` modules, scripts and their --options, CMake presets, programs
* environment variables of ours in `code` are read somewhere in the sources

Paths under the folders that the Makefile's commands write (build, demo, ...) may not exist yet.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path

from repo_files import GENERATED, list_files, read_text, report

IMPORT_ROOTS = ("", "include", "src", "python")
PATH_SUFFIXES = {
    *(".cfg", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".json", ".md", ".npz", ".png", ".py"),
    *(".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"),
}
PROGRAMS = {
    *("apt-get", "cd", "clang-format", "cmake", "ctest", "export", "g++", "git", "ldd", "make"),
    *("mkdir", "mypy", "nvcc", "pip", "pre-commit", "pytest", "python", "python3", "rm", "ruff"),
    "source",
}
OUR_VARIABLE = re.compile(r"\b(?:BACK_LITE|BACKLITE)_[A-Z_]*[A-Z]\b")
PATH = re.compile(r"^\.{0,2}/?[\w.*-]+(?:/[\w.*-]+)*/?$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HTML_SOURCE = re.compile(r"<(?:img|a)\b[^>]*\b(?:src|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^\s*```(\w*)\s*$")
INLINE_CODE = re.compile(r"`([^`\n]+)`")


class Repository:
    """What exists: files, make targets, presets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {path.as_posix() for path in list_files(root)}
        self.names = {path.rsplit("/", 1)[-1] for path in self.files}
        self.folders = {parent.as_posix() for path in self.files for parent in Path(path).parents}
        makefile = root / "Makefile"
        text = makefile.read_text() if makefile.exists() else ""
        self.targets = {
            target
            for line in re.findall(r"^([\w][\w -]*):(?!=)", text, re.MULTILINE)
            for target in line.split()
        }
        presets = root / "CMakePresets.json"
        self.presets = set()
        if presets.exists():
            for kind, entries in json.loads(presets.read_text()).items():
                if kind.endswith("Presets"):
                    self.presets |= {entry["name"] for entry in entries}
        self.sources = "\n".join(
            read_text(root / path) or "" for path in sorted(self.files) if not path.endswith(".md")
        )

    def has_path(self, name: str, folder: Path) -> bool:
        """Whether `name`, seen from `folder` or one of the roots, exists or gets generated."""
        name = name.removeprefix("./").rstrip("/")
        if name.split("/")[0] in GENERATED:
            return True
        for base in (folder.as_posix(), *IMPORT_ROOTS):
            candidate = normalise(f"{base}/{name}")
            if candidate in self.files or candidate in self.folders:
                return True
            if "*" in candidate and any(fnmatch(path, candidate) for path in self.files):
                return True
        return "/" not in name and name in self.names

    def has_module(self, module: str) -> Path | None:
        """The file that `python -m module` runs, if it is ours."""
        for base in IMPORT_ROOTS:
            stem = normalise(f"{base}/{module.replace('.', '/')}")
            for candidate in (f"{stem}/__main__.py", f"{stem}.py"):
                if candidate in self.files:
                    return self.root / candidate
        return None


def normalise(path: str) -> str:
    """Resolve `.` and `..` in a path from the root."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def looks_like_path(word: str) -> bool:
    """Whether a word has a slash or a file name's suffix, and nothing that paths lack."""
    if not PATH.match(word) or word.startswith("/"):
        return False
    return "/" in word or Path(word).suffix in PATH_SUFFIXES


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as the usual hosts make them."""
    headings = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def check_link(repository: Repository, document: Path, target: str) -> str | None:
    """Say what is wrong with a link or image of a document, if anything."""
    if re.match(r"^[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    path = normalise(f"{document.parent.as_posix()}/{name}") if name else document.as_posix()
    if path not in repository.files and path not in repository.folders:
        return f"link to {target}: no such file"
    if anchor and anchor not in anchors((repository.root / path).read_text()):
        return f"link to {target}: no such heading"
    return None


def check_options(script: Path, words: list[str]) -> list[str]:
    """The --options that neither the script, its package nor a neighbour it imports mentions."""
    if script.name == "__main__.py":
        package = [*script.parent.glob("*.py")]
    else:
        names = re.findall(r"^from \.(\w+) import", script.read_text(), re.MULTILINE)
        package = [script, *(script.with_name(f"{name}.py") for name in names)]
    text = "\n".join(path.read_text() for path in package)
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    return [f"{script.name} has no option {option}" for option in options if option not in text]


def check_python(repository: Repository, words: list[str]) -> list[str]:
    """`words` follow `python`."""
    if not words or words[0] == "-c":
        return []
    if words[0] != "-m":
        script = repository.root / normalise(words[0])
        return check_options(script, words[1:]) if script.exists() else []
    module = repository.has_module(words[1])
    if module is not None:
        return check_options(module, words[2:])
    if words[1].split(".")[0] in sys.stdlib_module_names | PROGRAMS:
        return []
    return [f"python -m {words[1]}: no such module"]


def check_command(repository: Repository, command: str, folder: Path) -> list[str]:
    """One simple command, without pipes and the like."""
    words = shlex.split(command)
    while words and re.match(r"^\w+=", words[0]):
        words.pop(0)
    if not words:
        return []
    program, rest = words[0], words[1:]
    problems = []
    if program == "make":
        goals = [word for word in rest if not word.startswith("-") and "=" not in word]
        problems += [
            f"make {goal}: no such target" for goal in goals if goal not in repository.targets
        ]
    elif program in ("python", "python3"):
        problems += check_python(repository, rest)
    elif program not in PROGRAMS and not repository.has_path(program, folder):
        problems.append(f"{program}: no such program")
    if "--preset" in rest[:-1]:
        preset = rest[rest.index("--preset") + 1]
        if preset not in repository.presets:
            problems.append(f"--preset {preset}: no such preset")
    if program not in ("cd", "git"):
        paths = [word for word in rest if looks_like_path(word)]
        problems += [
            f"{path}: no such path" for path in paths if not repository.has_path(path, folder)
        ]
    return problems


def check_code(repository: Repository, code: str, folder: Path) -> list[str]:
    """Inline code: a command, a path, or something else."""
    problems = [
        f"{variable}: read nowhere"
        for variable in OUR_VARIABLE.findall(code)
        if variable not in repository.sources
    ]
    if re.match(r"^(make|python3?|pytest|cmake|pip|ctest) +[\w.-]", code):
        problems += check_command(repository, code, folder)
    elif looks_like_path(code) and not repository.has_path(code, folder):
        problems.append(f"{code}: no such path")
    return problems


def check_document(repository: Repository, document: Path) -> list[str]:
    """List what a document names and the repository lacks."""
    text = (repository.root / document).read_text()
    problems = []
    language = None
    for number, line in enumerate(text.splitlines(), 1):
        found: list[str | None] = []
        fence = FENCE.match(line)
        if fence is not None:
            language = fence[1] if language is None else None
        elif language in ("bash", "sh", "console"):
            code = re.sub(r"(^|\s)#.*", "", line.removeprefix("$ "))
            for command in re.split(r"&&|\|\||[|;]", code):
                found += check_command(repository, command, document.parent)
        elif language in ("", "text"):
            words = line.split()
            if (
                words
                and looks_like_path(words[0])
                and not repository.has_path(words[0], document.parent)
            ):
                found.append(f"{words[0]}: no such path")
        elif language is None:
            for code in INLINE_CODE.findall(line):
                found += check_code(repository, code, document.parent)
            prose = INLINE_CODE.sub("", line)
            for target in LINK.findall(line) + HTML_SOURCE.findall(prose):
                found.append(check_link(repository, document, target))
        problems += [f"{document}:{number}: {problem}" for problem in found if problem is not None]
    if language is not None:
        problems.append(f"{document}: a code block is not closed")
    return problems


def main() -> int:
    """Check every document of the repository that the command line names."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    repository = Repository(root)
    documents = [path for path in list_files(root) if path.suffix == ".md"]
    problems = [problem for path in documents for problem in check_document(repository, path)]
    return report(problems, f"docs: what {len(documents)} documents name exists")


if __name__ == "__main__":
    sys.exit(main())
