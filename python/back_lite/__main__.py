"""The command line: ``python -m back_lite`` with ``calibrate``, ``report`` or ``doctor``."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from . import _doctor

if sys.argv[1:2] == ["doctor"]:  # before anything that needs torch or the library
    sys.exit(_doctor.main(sys.argv[2:]))

from ._calibrate import Measurement, calibrate, check_batches, choose
from ._calibration import PER, Calibration, Target

_EXAMPLE = Path(__file__).with_name("_example.py")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m back_lite", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "calibrate",
        help="choose negl_prob from measured gradient errors",
        description="Chooses the largest negl_prob that meets a target, from the gradients of real "
        "batches. Interrupted, it keeps what it found, and the same command goes on; a file of a "
        "whole run stays until another is done.",
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="Python file that defines model (a torch.nn.Module), batches (an iterable, of the "
        "same order at every run) and, unless model(batch) returns the loss, step(model, batch), "
        "which runs forward and backward",
    )
    source.add_argument("--example", action="store_true", help="a small model, trained for it")
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument("--cosine", type=float, help="least cosine of dQ, dK and dV")
    target.add_argument("--relative-l2", type=float, help="largest relative L2 error of them")
    command.add_argument("--per", choices=PER, default=PER[0], help="(%(default)s)")
    command.add_argument(
        "--out", type=Path, default=Path("calibration.json"), help="file to write (%(default)s)"
    )
    command = commands.add_parser(
        "report",
        help="draw what a calibration found",
        description="Writes one HTML page, which needs no network, and its pictures as PNG files.",
    )
    command.add_argument(
        "calibration",
        type=Path,
        nargs="?",
        default=Path("calibration.json"),
        help="file that calibrate wrote (%(default)s)",
    )
    command.add_argument(
        "--out", type=Path, default=Path("report"), help="folder to write into (%(default)s)"
    )
    commands.add_parser("doctor", help="say what a bug report needs, and check the library")
    return parser.parse_args()


def _calibrate(args: argparse.Namespace) -> int:
    target = Target(cosine=args.cosine, relative_l2=args.relative_l2)
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise ValueError(f"--out {args.out}: accepted is a file in a folder that exists")
    script = _EXAMPLE if args.example else args.script
    names = _run_script(script)
    partial = args.out.with_name(args.out.name + ".partial")
    if partial.exists():
        print(f"Going on from {partial}; remove it to start anew", file=sys.stderr)
    interrupted = False
    try:
        with contextlib.closing(_with_bar(names["batches"])) as batches:
            found = calibrate(
                names["model"],
                batches,
                target,
                args.per,
                step=names.get("step"),
                partial=partial,
            )
    except KeyboardInterrupt:
        if not partial.exists():
            print("Interrupted before the first batch was done: nothing is kept", file=sys.stderr)
            return 130
        interrupted = True
        found = choose(Measurement.load(partial), target, args.per, complete=False)
    print(found)
    if interrupted and _is_whole(args.out):
        print(f"Interrupted: {args.out} is still that of before; the same command goes on")
        return 130
    found.save(args.out)
    if interrupted:
        print(f"Interrupted: {args.out} is of the batches so far; the same command goes on")
        return 130
    partial.unlink(missing_ok=True)  # another process may have worked on it
    print(f"Wrote {args.out}; back_lite.load_calibration(model, {str(args.out)!r}) applies it")
    return 0


def _is_whole(path: Path) -> bool:
    """Whether there is a file that half a result must not replace: any but another half one."""
    try:
        return Calibration.load(path).complete
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # of another version, say
        return True


def _report(args: argparse.Namespace) -> int:
    calibration = Calibration.load(args.calibration)
    try:
        from ._report import write_report
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        print("error: the report needs matplotlib (pip install matplotlib)", file=sys.stderr)
        return 1
    for path in write_report(calibration, args.out):
        print(path)
    return 0


def _run_script(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--script {path}: accepted is a Python file")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
    names = runpy.run_path(str(path), run_name="__calibrate__")
    for name in ("model", "batches"):
        if name not in names:
            raise ValueError(
                f"--script {path} defines no {name}: accepted is a file that defines model and "
                "batches, and step where model(batch) does not return the loss"
            )
    check_batches(names["batches"])
    return names


def _with_bar(batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Show a bar from the first batch on, so that what is wrong before has a line of its own."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        print("No progress bar: it needs tqdm (pip install tqdm)", file=sys.stderr)
        yield from batches
        return
    yield from tqdm(batches, desc="calibrating", unit="batch", dynamic_ncols=True)


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it and not, say, the script, whose traceback is wanted."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _EXAMPLE.parent


def main() -> int:
    """Run the command line; return the exit status."""
    args = _parse()
    try:
        return _calibrate(args) if args.command == "calibrate" else _report(args)
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        if not _is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
