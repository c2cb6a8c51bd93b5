"""``python -m back_lite doctor``: what a bug report needs, and whether the library works.

This file imports neither torch nor the library: it must speak where they are missing or broken.
What needs them happens in a process of its own, _doctor_checks.py, which may fail, crash or hang.
That one writes JSON lines: one as each of its steps begins, and the results.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

TIMEOUT = 180  # seconds; torch takes a minute to import from a slow file system
PACKAGES = (
    *("backlite-attention", "torch", "apache-tvm-ffi", "torch-c-dlpack-ext", "triton", "numpy"),
)
VARIABLES = re.compile(
    r"BACK_LITE_|BACKLITE_|CUDA_|NVIDIA_VISIBLE|OMP_|KMP_|GOMP_|MKL_|PYTORCH_|TORCH|LD_PRELOAD|LD_LIBRARY"
)

Report = dict[str, Any]


def examine() -> Report:
    """Collect everything; the report has a list of ``problems`` and tells whether all is ``ok``."""
    report: Report = {
        "system": _system(),
        "driver": _driver(),
        "nvcc": _nvcc(),
        "packages": {name: _package_version(name) for name in PACKAGES},
        "environment": {k: v for k, v in sorted(os.environ.items()) if VARIABLES.match(k)},
    }
    report.update(_run_checks())
    failed = any(not check["ok"] for check in report["checks"])
    report["ok"] = not failed and not report["problems"]
    return report


# ---- Without torch -------------------------------------------------------------------------------


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _match(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else None


def _system() -> Report:
    memory = _match(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"))
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return {
        "os": _match(r'^PRETTY_NAME="?([^"\n]*)', _read("/etc/os-release")) or platform.system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "machine": platform.machine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "cpu": _match(r"^model name\s*:(.*)", _read("/proc/cpuinfo"))
        or platform.processor()
        or None,
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1) if memory else None,
    }


def _output_of(*command: str) -> tuple[str, str | None]:
    """What a program prints, and what is wrong with it."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return "", f"{command[0]} was not found"
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer within 30 s"
    except OSError as error:
        return "", f"{command[0]}: {error}"
    if process.returncode != 0:
        return "", f"{command[0]}: {_last_line(process.stdout + process.stderr)}"
    return process.stdout, None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _driver() -> Report:
    """The driver's own view of the GPUs, which torch may not share."""
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    output, problem = _output_of(
        "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    gpus = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    version = gpus[0]["driver_version"] if gpus else None
    if version is None:
        version = _match(r"Kernel Module\D*([\d.]+)", _read("/proc/driver/nvidia/version"))
    return {"version": version, "gpus": gpus, "problem": problem}


def _nvcc() -> Report:
    """The nvcc that a build would find now."""
    found = shutil.which("nvcc")
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if found is None and home:
            found = shutil.which("nvcc", path=str(Path(home) / "bin"))
    if found is None:
        return {"path": None, "version": None}
    return {"path": found, "version": _match(r"V([\d.]+)", _output_of(found, "--version")[0])}


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except Exception:  # absent, or its record is damaged
        return None


# ---- With torch, in another process --------------------------------------------------------------


def _run_checks() -> Report:
    """The report of the other process, and its problems: one line each."""
    report: Report = {"torch": None, "library": None, "backends": {}, "checks": [], "problems": []}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    checks = Path(__file__).with_name("_doctor_checks.py")
    ended = ""
    try:
        process = subprocess.run(
            [sys.executable, str(checks)], env=environment, capture_output=True, timeout=TIMEOUT
        )
        output, errors = process.stdout, process.stderr
        said = _last_line(errors.decode(errors="replace"))
        if process.returncode < 0:
            ended = f"crashed ({_signal_name(-process.returncode)}): {said}"
        elif process.returncode > 0:
            ended = f"failed: {said}"
    except subprocess.TimeoutExpired as error:
        output, ended = error.stdout or b"", f"did not end within {TIMEOUT} s"
    except OSError as error:
        output, ended = b"", f"did not start: {error}"
    step = "start"
    for line in output.decode(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the line in which it crashed
            break
        step = event.pop("begin", step)
        report["checks"] += event.pop("checks", [])
        report["problems"] += event.pop("problems", [])
        report.update(event)
    if ended:
        report["problems"].append(f"{step}: {ended}")
    return report


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- Text ----------------------------------------------------------------------------------------


def to_text(report: Report) -> str:
    """Lay a report out for reading."""
    lines: list[str] = []

    def section(title: str, rows: list[tuple[str, Any]]) -> None:
        lines.append(title)
        lines.extend(f"  {name:<12} {value}" for name, value in rows if value not in (None, ""))

    system = report["system"]
    cores = f"{system['usable_cores']} of {system['cores']} cores"
    memory = f", {system['memory_gib']} GiB" if system["memory_gib"] else ""
    section(
        "system",
        [
            (
                "os",
                f"{system['os']}, kernel {system['kernel']}, {system['libc'] or 'libc unknown'}",
            ),
            ("python", f"{system['python']} ({system['executable']})"),
            ("cpu", f"{system['cpu'] or system['machine']}, {cores}{memory}"),
        ],
    )
    driver, nvcc = report["driver"], report["nvcc"]
    section(
        "nvidia",
        [
            ("driver", driver["version"] or "none found"),
            ("", driver["problem"]),
            *((f"gpu {i}", ", ".join(gpu.values())) for i, gpu in enumerate(driver["gpus"])),
            ("nvcc", f"{nvcc['version']} ({nvcc['path']})" if nvcc["path"] else "none found"),
        ],
    )
    section(
        "packages", [(name, version) for name, version in report["packages"].items() if version]
    )
    for title in ("torch", "library", "backends"):
        if report[title]:
            section(title, list(report[title].items()))
    if report["environment"]:
        section("environment", list(report["environment"].items()))
    if report["checks"]:
        section(
            "self-check", [(check["backend"], _check_line(check)) for check in report["checks"]]
        )
    lines += [f"problem: {problem}" for problem in report["problems"]]
    lines.append("result: all well" if report["ok"] else "result: something is wrong, see above")
    return "\n".join(lines)


def _check_line(check: Report) -> str:
    what = f"{check['dtype']}, head dim {check['head_dim']}, {check['backward']}: "
    if "problem" in check:
        return what + f"FAILED: {check['problem']}"
    return what + (
        f"{'ok' if check['ok'] else 'WRONG'}\n{'':15}relative error {check['error']:.1e} in "
        f"{check['worst']} (at most {check['bound']:.1e}); density {check['density']:.2f}; "
        f"forward {check['forward_ms']:.2f} ms, backward {check['backward_ms']:.2f} ms"
    )


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if every check passed and nothing is broken, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m back_lite doctor",
        description="Says what a bug report needs, and checks that each backend computes what it "
        "should. The exit status is 0 if all is well.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    report = examine()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths that a terminal cannot show
    try:
        print(json.dumps(report, indent=2) if args.json else to_text(report), flush=True)
    except OSError as error:  # a full disk, or a pipe whose reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if report["ok"] else 1
