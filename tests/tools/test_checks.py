"""Each check of tools/ passes a clean tree and fails on the fault that it is there for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(check: str, root: Path, files: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return subprocess.run(
        [sys.executable, TOOLS / check, root], capture_output=True, text=True, check=False
    )


# ---- layering -----------------------------------------------------------------------------------

LAYERED = {
    "include/backlite/backlite.h": "#include <cstdint>\n",
    "src/common/mask.h": '#include "backlite/backlite.h"\n',
    "src/sm90/wgmma.cuh": "#include <cute/arch/mma_sm90_gmma.hpp>\n",
    "src/forward/cpu.cpp": '#include <Eigen/Core>\n#include "common/mask.h"\n',
    "src/schedule/layout.h": '#include "common/mask.h"\n',
    "src/backward/cpu.cpp": '#include "schedule/layout.h"\n',
    "src/api/backlite.cpp": '#include "backward/cpu.h"\n',
    "src/binding/ffi.cpp": "#include <backlite/backlite.h>\n#include <tvm/ffi/tvm_ffi.h>\n",
}


def test_layering_passes_a_layered_tree(tmp_path: Path) -> None:
    result = run("check_layering.py", tmp_path, LAYERED)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("src/sm90/wgmma.cuh", '#include "backlite/backlite.h"'),
        ("src/common/mask.h", '#include "forward/cpu.h"'),
        ("src/forward/cpu.cpp", '#include "select/cpu.h"'),
        ("src/select/cpu.cpp", '#include "forward/cpu.h"'),
        ("src/backward/cpu.cpp", '#include "schedule/cpu.h"'),
        ("src/backward/cpu.cpp", '#include "cpu.h"'),
        ("src/backward/cpu.cpp", '#include "../forward/cpu.h"'),
        ("src/api/backlite.cpp", "#include <tvm/ffi/tvm_ffi.h>"),
        ("src/api/backlite.cpp", "#  include <torch/torch.h>"),
        ("src/api/backlite.cpp", "#include <Python.h>"),
        ("src/binding/ffi.cpp", '#include "common/mask.h"'),
        ("include/backlite/backlite.h", "#include <cuda_runtime.h>"),
        ("include/backlite/backlite.h", '#include "common/mask.h"'),
        ("src/utils/misc.h", "#include <cstdint>"),
    ],
)
def test_layering_fails_on_a_wrong_include(tmp_path: Path, file: str, line: str) -> None:
    result = run("check_layering.py", tmp_path, {**LAYERED, file: line + "\n"})
    assert result.returncode == 1
    assert file in result.stdout


# ---- source text --------------------------------------------------------------------------------


def test_source_passes_clean_text(tmp_path: Path) -> None:
    files = {
        "src/a.cpp": "// Why: the sum is exact;\n// it is.\nint a = 1;  // one; the only one\n"
        + "x\n" * 400,
        "tests/long_test.cpp": "int b;\n" * 600,
        "README.md": "See docs/home/work.md and ./tmp/x and https://example.org/home/page.\n",
    }
    result = run("check_source.py", tmp_path, files)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("src/a.cpp", "  // x = compute(y);\n", "ends like code"),
        ("src/a.cuh", "// if (x) {\n", "ends like code"),
        ("src/a.cu", "int a;\n" * 500, "500 lines"),
        ("include/backlite/a.h", "// " + "long " * 20 + "\n", "columns"),
        ("notes.txt", "data = /" + "home/someone/data\n", "machine path"),
        ("tool.py", "PATH = '/" + "tmp/w/x'\n", "machine path"),
    ],
)
def test_source_fails_on_a_fault(tmp_path: Path, file: str, text: str, reason: str) -> None:
    result = run("check_source.py", tmp_path, {file: text})
    assert result.returncode == 1
    assert file in result.stdout
    assert reason in result.stdout


# ---- documentation ------------------------------------------------------------------------------

DOCUMENTED = {
    "Makefile": "A := 1\n.PHONY: test\ntest:  ## run\n\ttrue\ndemo build: test\n",
    "CMakePresets.json": '{"version": 6, "configurePresets": [{"name": "release"}]}',
    "include/backlite/backlite.h": "",
    "examples/train/__main__.py": 'parser.add_argument("--steps")\n',
    "examples/train/plot.py": "from .options import add\n",
    "examples/train/options.py": 'parser.add_argument("--size")\n',
    "benchmarks/cpu.py": 'os.environ.get("BACK_LITE_VERBOSE")\n',
    "docs/maths.md": "# The maths, in steps\n\n[Start](../README.md), `benchmarks/cpu.py`\n",
    "README.md": """# Project
[maths](docs/maths.md#the-maths-in-steps), `docs/`, `backlite/backlite.h`, `docs/*.md`, `demo/x.png`
Set `BACK_LITE_VERBOSE=1`, then `make test` or `make demo`; 3/4 of `torch.compile` is no path.
```bash
make demo ARGS="--steps 3" && python -m examples.train --steps 3
BACK_LITE_VERBOSE=1 python benchmarks/cpu.py  # prints; then | ends
python -m examples.train.plot --size 3
cmake --preset release
python -m pip install .
```
```cpp
#include "not/checked.h"
```
""",
}


def test_docs_pass_where_all_exists(tmp_path: Path) -> None:
    result = run("check_docs.py", tmp_path, DOCUMENTED)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[a](docs/missing.md)", "docs/missing.md"),
        ("[a](docs/maths.md#nowhere)", "#nowhere"),
        ("![a](docs/images/a.png)", "docs/images/a.png"),
        ('<img src="docs/images/a.png">', "docs/images/a.png"),
        ("see `src/gone.cpp`", "src/gone.cpp"),
        ("see `gone.py`", "gone.py"),
        ("run `make bench`", "make bench"),
        ("run `python -m examples.gone`", "examples.gone"),
        ("set `BACK_LITE_LOUD=1`", "BACK_LITE_LOUD"),
        ("```bash\nmake bench\n```", "make bench"),
        ("```bash\nmake test && make bench\n```", "make bench"),
        ("```bash\npython benchmarks/gone.py\n```", "benchmarks/gone.py"),
        ("```bash\npython -m examples.train --epochs 3\n```", "--epochs"),
        ("```bash\npython -m examples.train.plot --steps 3\n```", "--steps"),
        ("```bash\npython benchmarks/cpu.py --quick\n```", "--quick"),
        ("```bash\ncmake --preset fast\n```", "fast"),
        ("```bash\ntools/gone.sh\n```", "tools/gone.sh"),
        ("```bash\nfrobnicate now\n```", "frobnicate"),
        ("```text\nsrc/gone/   a folder\n```", "src/gone/"),
        ("```bash\nmake test", "not closed"),
    ],
)
def test_docs_fail_on_what_does_not_exist(tmp_path: Path, text: str, named: str) -> None:
    result = run("check_docs.py", tmp_path, {**DOCUMENTED, "docs/page.md": text + "\n"})
    assert result.returncode == 1, result.stdout
    assert "docs/page.md" in result.stdout
    assert named in result.stdout
