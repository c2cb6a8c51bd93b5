"""DistributedDataParallel and FSDP2 around a model that uses BackLite: two processes, gloo."""

from __future__ import annotations

from pathlib import Path

import child
import pytest
import ranks
from torch import distributed

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this build of torch has no gloo",
)


needs_fsdp2 = pytest.mark.skipif(
    not ranks.has_fsdp2(), reason="torch before 2.6 has no FSDP2 for the CPU"
)


def run(scenario: str, folder: Path) -> None:
    child.run_ranks(ranks.__file__, scenario, "cpu", folder=folder)


def test_ddp(tmp_path: Path) -> None:
    run("ddp", tmp_path)


def test_ddp_leaves_thresholds_alone(tmp_path: Path) -> None:
    run("ddp_thresholds", tmp_path)


@needs_fsdp2
def test_fsdp2(tmp_path: Path) -> None:
    run("fsdp2", tmp_path)


@needs_fsdp2
def test_tensor_parallel(tmp_path: Path) -> None:
    run("tensor_parallel", tmp_path)
