"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import back_lite
import torch
from back_lite._library import cpu_isa


def describe() -> dict[str, dict[str, object]]:
    """Machine and versions, to be kept beside the numbers."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
    machine: dict[str, object] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_isa": cpu_isa,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }
    versions: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "back_lite": back_lite.__version__,
    }
    return {"machine": machine, "versions": versions}
