"""The options that both examples of calibration have."""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.train_lm.__main__ import default_device
from examples.train_lm.arguments import device, make_folder, whole


def make_parser(
    program: str, description: str | None, *, steps: int, context: int, unseen: int
) -> argparse.ArgumentParser:
    """Options for a training, and what is checked; numbers are defaults."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=whole(1), default=steps, help="of training (%(default)s)")
    add("--context", type=whole(1), default=context, help="bytes read (%(default)s)")
    add("--size", type=whole(1), default=1, help="windows in a batch (%(default)s)")
    add("--unseen", type=whole(1), default=unseen, help="batches to check on (%(default)s)")
    add("--device", type=device, help="cpu or cuda (default: cuda where there are kernels)")
    add("--seed", type=whole(0), default=0, help="of weights and data (%(default)s)")
    add("--out", type=Path, default=Path("build/calibrate_lm"), help="folder (%(default)s)")
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Choose the device, make the folder; after all else that may be refused."""
    args.device = args.device or default_device()
    make_folder("--out", args.out)
