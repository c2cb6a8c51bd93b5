"""The formulas of docs/3-memory.md, as functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "3-memory.md"


def formulas() -> dict[str, Callable[..., int]]:
    """Run every Python block of the document; return what they define, by name."""
    blocks = re.findall(r"^```python\n(.*?)^```", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec("\n".join(blocks), namespace)
    return namespace
