"""DistributedDataParallel and FSDP2 around a model that uses BackLite: two GPUs, NCCL."""

from __future__ import annotations

from pathlib import Path

import child
import pytest
import ranks
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < ranks.WORLD,
    reason=f"needs {ranks.WORLD} GPUs, and torch sees {torch.cuda.device_count()}",
)


@pytest.mark.parametrize("scenario", ranks.SCENARIOS)
def test_two_gpus(scenario: str, tmp_path: Path) -> None:
    if scenario in ("fsdp2", "tensor_parallel") and not ranks.has_fsdp2():
        pytest.skip("torch before 2.6 has no fully_shard in torch.distributed.fsdp")
    child.run_ranks(ranks.__file__, scenario, "cuda", folder=tmp_path)
