"""Writes docs/results.md and its figures from the JSON in docs/results/.

    python -m benchmarks.results    # or: make results

Takes what is there: more seeds or lengths make longer tables, and what is missing leaves its
section out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.files import write_text

from .data import load
from .text import write

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", action="store_true", help="leave the figures as they are")
    args = parser.parse_args()
    data = load(DOCS / "results")
    write_text(DOCS / "results.md", write(data))
    if not args.text:
        from .figures import draw  # matplotlib

        draw(data, DOCS / "images")


if __name__ == "__main__":
    main()
