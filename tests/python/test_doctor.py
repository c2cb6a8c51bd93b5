"""python -m back_lite doctor: on a sound machine, on broken ones, with a library that is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import back_lite
import child
import pytest
import torch
from back_lite import _doctor, _doctor_checks, _library

CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
ABORTS = "import os, sys; print('why it ends', file=sys.stderr, flush=True); os.abort()"


def doctor(*options: str, first: Path | None = None, **changes: str) -> tuple[int, str]:
    """Exit status and output; what lies in the folder `first` is imported before anything else."""
    environment = child.environment(**changes)
    if first is not None:
        environment["PYTHONPATH"] = f"{first}:{environment['PYTHONPATH']}"
    process = subprocess.run(
        [sys.executable, "-m", "back_lite", "doctor", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=child.TIMEOUT,
    )
    assert "Traceback" not in process.stdout + process.stderr
    return process.returncode, process.stdout


def fake_module(folder: Path, name: str, code: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    return folder


def test_report_of_a_sound_machine() -> None:
    status, output = doctor("--json", CUDA_VISIBLE_DEVICES="")
    report = json.loads(output)
    assert status == 0
    assert report["ok"]
    assert report["problems"] == []
    assert report["torch"]["version"] == torch.__version__
    assert report["library"]["version"] == back_lite.__version__
    assert report["library"]["cpu isa"] == _library.cpu_isa
    assert report["library"]["file"] == str(_library.path)
    assert report["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert report["backends"]["cpu"].startswith("available")
    assert report["backends"]["cuda"].startswith("not available: ")
    exact, sparse = report["checks"]
    assert exact["density"] == 1.0
    assert 0.0 < sparse["density"] < 0.7
    assert 0.0 < exact["error"] < exact["bound"]


def test_text_names_what_a_bug_report_needs() -> None:
    status, output = doctor(BACK_LITE_CPU_ISA="baseline", CUDA_VISIBLE_DEVICES="")
    assert status == 0
    for words in ("kernel", "nvcc", torch.__version__, "available (baseline)", "result: all well"):
        assert words in output
    assert "BACK_LITE_CPU_ISA" in output


@pytest.mark.parametrize(
    ("name", "code", "problem"),
    [
        (
            "torch",
            "raise ModuleNotFoundError('No module named torch')",
            "torch: ModuleNotFoundError: No module named torch",
        ),
        ("torch", "raise OSError('libcudart.so: cannot open')", "torch: OSError: libcudart.so"),
        ("torch", CRASHES, "torch: crashed (SIGSEGV): no message"),
        ("torch", ABORTS, "torch: crashed (SIGABRT): why it ends"),
        ("tvm_ffi", "raise ImportError('broken')", "library: ImportError: back_lite needs tvm-ffi"),
        ("tvm_ffi", CRASHES, "library: crashed (SIGSEGV)"),
    ],
    ids=[
        "no torch",
        "torch fails",
        "torch crashes",
        "torch aborts",
        "no tvm-ffi",
        "tvm-ffi crashes",
    ],
)
def test_broken_packages(tmp_path: Path, name: str, code: str, problem: str) -> None:
    status, output = doctor(first=fake_module(tmp_path, name, code))
    assert status == 1
    assert f"problem: {problem}" in output
    assert "result: something is wrong" in output


def test_no_library(tmp_path: Path) -> None:
    status, output = doctor(BACK_LITE_LIBRARY_DIR=str(tmp_path))
    assert status == 1
    assert f"problem: library: ImportError: back_lite: libbacklite_ffi.so is not in {tmp_path}" in (
        output
    )


def test_library_cut_short(tmp_path: Path) -> None:
    """As a full disk leaves it: the loader refuses it, or dies of it."""
    for file in _library.path.parent.glob("*.so"):
        shutil.copy(file, tmp_path)
    (tmp_path / "libbacklite.so").write_bytes(b"\x7fELF" + bytes(2000))
    status, output = doctor("--json", BACK_LITE_LIBRARY_DIR=str(tmp_path))
    assert status == 1
    (problem,) = json.loads(output)["problems"]
    assert problem.startswith("library: ")


def test_wrong_instruction_set() -> None:
    status, output = doctor(BACK_LITE_CPU_ISA="mmx")
    assert status == 1
    assert "problem: library: ValueError: BACK_LITE_CPU_ISA = mmx: accepted are" in output


def test_a_terminal_that_cannot_show_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "größer"
    status, output = doctor(PYTHONIOENCODING="ascii", BACK_LITE_LIBRARY_DIR=str(folder))
    assert status == 1
    assert r"gr\xf6\xdfer" in output


@pytest.mark.parametrize(
    ("kind", "message"),
    [("full", "error: [Errno 28] No space left on device\n"), ("closed pipe", "")],
)
def test_output_that_goes_nowhere(kind: str, message: str, tmp_path: Path) -> None:
    if kind == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "back_lite", "doctor"],
        env=child.environment(BACK_LITE_LIBRARY_DIR=str(tmp_path)),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(output)
    assert process.returncode == 1
    assert process.stderr == message


@pytest.mark.parametrize("content", ["[1]", "3", "{", ""])
def test_record_of_the_build_is_damaged(tmp_path: Path, content: str) -> None:
    for file in _library.path.parent.glob("*.so"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "backlite_build.json").write_text(content)
    status, output = doctor(BACK_LITE_LIBRARY_DIR=str(tmp_path))
    assert status == 0
    assert re.search(r"build +unknown", output)


# ---- In this process -----------------------------------------------------------------------------


def report_of(checks: list[Any]) -> dict[str, Any]:
    return {
        "torch": None,
        "library": None,
        "backends": {},
        "checks": checks,
        "problems": [],
    }


@pytest.mark.parametrize("wrong", ["value", "nan", "raises"])
def test_a_wrong_library_is_found(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = back_lite.attention

    def attention(*arguments: Any, **options: Any) -> Any:
        out, lse = right(*arguments, **options)
        if wrong == "raises":
            raise RuntimeError("illegal\ninstruction")
        return out * 1.001 if wrong == "value" else out / 0.0, lse

    monkeypatch.setattr(back_lite, "attention", attention)
    checks = list(_doctor_checks._check_device(torch.device("cpu")))
    assert [check["ok"] for check in checks] == [False, False]
    monkeypatch.setattr(_doctor, "_run_checks", lambda: report_of(checks))
    assert _doctor.main([]) == 1
    output = capsys.readouterr().out
    found = {
        "value": "WRONG",
        "nan": "WRONG",
        "raises": "FAILED: RuntimeError: illegal instruction",
    }
    assert output.count(found[wrong]) == 2
    assert "result: something is wrong" in output


def test_a_hang_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "TIMEOUT", 0.01)
    report = _doctor.examine()
    assert report["problems"] == ["start: did not end within 0.01 s"]
    assert not report["ok"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 9", "nvidia-smi: no message"),
        ("echo 'No devices were found'; exit 6", "nvidia-smi: No devices were found"),
        ("echo nonsense", None),
        ("echo 'NVIDIA H200, 580.65.06, 9.0, 143771 MiB'", None),
    ],
)
def test_nvidia_smi(
    tmp_path: Path, script: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    driver = _doctor._driver()
    assert driver["problem"] == expected
    if "H200" in script:
        assert driver["version"] == "580.65.06"
        assert driver["gpus"][0]["name"] == "NVIDIA H200"
    else:
        assert driver["gpus"] == []


def test_only_doctor_leaves_the_package_empty(tmp_path: Path) -> None:
    """Another program may have a command of the same name."""
    (tmp_path / "program.py").write_text("import back_lite; print(back_lite.BackLite())")
    for command in (["-m", "program"], [str(tmp_path / "program.py"), "-m", "back_lite"]):
        output = subprocess.run(
            [sys.executable, *command, "doctor"],
            env=child.environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "BackLite(" in output
