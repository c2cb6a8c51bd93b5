"""The README's Python examples run, one after the other, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example saves a file
    text = README.read_text()
    namespace: dict[str, Any] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    for block in blocks:
        # Line numbers of a failure are those of the README.
        lines_before = text[: block.start(1)].count("\n")
        code = compile("\n" * lines_before + block[1], str(README), "exec")
        exec(code, namespace)
