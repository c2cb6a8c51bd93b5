"""python -m back_lite doctor on a Hopper GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import child
import torch


def test_doctor_checks_the_gpu() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "back_lite", "doctor", "--json"],
        env=child.environment(),
        capture_output=True,
        text=True,
        timeout=child.TIMEOUT,
    )
    report = json.loads(process.stdout)
    checks = [check for check in report["checks"] if check["backend"] == "cuda"]
    assert [(check["head_dim"], check["backward"], check["ok"]) for check in checks] == [
        (64, "exact", True),
        (64, "sparse", True),
        (128, "exact", True),
        (128, "sparse", True),
    ], checks
    assert all(check["density"] < 1.0 for check in checks if check["backward"] == "sparse")
    assert process.returncode == 0, report["problems"]
    assert torch.cuda.get_device_name(0) in report["backends"]["cuda"]
