"""The part of doctor that needs torch and the library: a process of its own, started by _doctor.py.

Prints one JSON object a line: ``{"begin": step}``, then parts of the report. A problem is one line.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LENGTH, HEADS, KEY_HEADS, NEGL_PROB, REPEATS = 512, 4, 2, 0.1, 5
HOPPER = 9  # compute capability


class Reporter:
    """Writes to where the standard output led at the start; whatever else is printed goes aside."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def write(self, **event: Any) -> None:
        """Write one line."""
        print(json.dumps(event), file=self._file)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Turn an exception of a step into a problem, after which nothing goes on."""
        self.write(begin=name)
        try:
            yield
        except Exception as error:
            self.write(problems=[f"{name}: {_describe(error)}"])
            sys.exit(0)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _tell_torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "file": torch.__file__,
        "cuda": torch.version.cuda or "none: a build for the CPU",
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "threads": torch.get_num_threads(),
    }


def _tell_library() -> dict[str, Any]:
    import back_lite
    from back_lite import _library

    path = _library.path
    try:
        build = dict(json.loads(path.with_name("backlite_build.json").read_text()))
    except (OSError, ValueError, TypeError):
        build = {}
    kernels = f"built by nvcc {build.get('nvcc') or 'of unknown version'}"
    return {
        "version": back_lite.__version__,
        "package": str(Path(back_lite.__file__).parent),
        "file": str(path),
        "build": ", ".join(filter(None, (build.get("type"), build.get("compiler")))) or "unknown",
        "cpu isa": _library.cpu_isa,
        "hopper": kernels if _library.has_cuda else "not built: there was no nvcc 12.8 or newer",
    }


def _tell_backends() -> tuple[dict[str, str], list[torch.device]]:
    """Say of each backend whether it is there, and why not; return the devices to check."""
    import torch

    from back_lite import _library

    backends = {"cpu": f"available ({_library.cpu_isa})"}
    devices = [torch.device("cpu")]
    reasons = []
    if not _library.has_cuda:
        reasons.append("this build of back_lite has no Hopper kernels")
    if torch.version.cuda is None:
        reasons.append("this build of torch has no CUDA")
    elif _sees_a_gpu(reasons):
        names = []
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            names.append(f"cuda:{i} {torch.cuda.get_device_name(i)} (sm_{major}{minor})")
            if major == HOPPER and _library.has_cuda and len(devices) == 1:
                devices.append(torch.device("cuda", i))
        if len(devices) == 1 and _library.has_cuda:
            reasons.append(f"no Hopper GPU (sm_90) among {', '.join(names)}")
    if len(devices) > 1:
        backends["cuda"] = f"available ({', '.join(names)}); {devices[1]} is checked"
    else:
        backends["cuda"] = f"not available: {'; '.join(reasons)}"
    return backends, devices


def _sees_a_gpu(reasons: list[str]) -> bool:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sees = torch.cuda.is_available()
    if not sees:
        words = [" ".join(str(warning.message).split()) for warning in caught]
        reasons.append(": ".join(["torch sees no GPU", *words]))
    return sees


# ---- Self-check ----------------------------------------------------------------------------------


def _inputs(dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    """query, key, value and grad_out. Queries look for the keys at their own place: sparse."""
    import torch

    rng = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, LENGTH, heads, head_dim, generator=rng, dtype=torch.float64)

    topics = torch.randn(LENGTH // 128, head_dim, generator=rng, dtype=torch.float64)
    topics = topics.repeat_interleave(128, 0)[None, :, None]
    query, key = normal(HEADS) + topics, normal(KEY_HEADS) + topics
    return [t.to(dtype) for t in (query, key, normal(KEY_HEADS), normal(HEADS))]


def _milliseconds(function: Callable[[], object], device: torch.device) -> float:
    import torch

    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _bound(dtype: torch.dtype) -> float:
    """Relative L2: 16-bit numbers are rounded on the way and at the end, float32 ones summed."""
    import torch

    eps = torch.finfo(dtype).eps
    return eps * LENGTH**0.5 if dtype == torch.float32 else 2.0 * eps


def _check(device: torch.device, dtype: torch.dtype, head_dim: int, negl_prob: float) -> Any:
    """Compare forward and backward with the float64 reference, on the library's own live tiles."""
    import torch

    from back_lite import attention, ops, reference, unpack_tiles

    inputs = _inputs(dtype, head_dim)
    query, key, value, grad_out = (t.detach().to(device) for t in inputs)
    leaves = [t.requires_grad_() for t in (query, key, value)]

    def forward() -> tuple[Tensor, Tensor]:
        return attention(query, key, value, negl_prob, causal=True, return_softmax_lse=True)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    out, lse = forward()
    results = (out, lse, *backward())
    _, _, stats = ops.forward(query, key, value, causal=True, record=True)
    assert stats is not None
    bits = ops.select(stats, negl_prob, query_length=LENGTH, key_length=LENGTH, causal=True)
    live = unpack_tiles(bits, stats.shape[2]).cpu()
    allowed = reference.mask_tiles(LENGTH, LENGTH, causal=True).expand(live.shape)
    truth = (
        *reference.attention(*inputs[:3], causal=True),
        *reference.backward(inputs[3], *inputs[:3], live=live, causal=True),
    )
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    errors = {
        name: float((ours.detach().cpu().double() - theirs).norm() / theirs.norm())
        for name, ours, theirs in zip(names, results, truth, strict=True)
    }
    # NaN is the worst of all.
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return {
        "ok": errors[worst] <= _bound(dtype),
        "error": errors[worst],
        "worst": worst,
        "bound": _bound(dtype),
        "density": int((live & allowed).sum()) / int(allowed.sum()),
        "forward_ms": _milliseconds(forward, device),
        "backward_ms": _milliseconds(backward, device),
    }


def _check_device(device: torch.device) -> Iterator[dict[str, Any]]:
    import torch

    kinds = {"cpu": [(torch.float32, 64)], "cuda": [(torch.bfloat16, 64), (torch.bfloat16, 128)]}
    for dtype, head_dim in kinds[device.type]:
        for backward, negl_prob in (("exact", 0.0), ("sparse", NEGL_PROB)):
            what = {
                "backend": device.type,
                "dtype": str(dtype).removeprefix("torch."),
                "head_dim": head_dim,
                "backward": backward,
            }
            try:
                yield what | _check(device, dtype, head_dim, negl_prob)
            except Exception as error:
                yield what | {"ok": False, "problem": _describe(error)}


def main() -> None:
    """Run step by step; the first that fails is the last."""
    reporter = Reporter()
    with reporter.step("torch"):
        reporter.write(torch=_tell_torch())
    with reporter.step("library"):
        reporter.write(library=_tell_library())
    with reporter.step("backends"):
        backends, devices = _tell_backends()
        reporter.write(backends=backends)
    for device in devices:
        with reporter.step(f"self-check on {device.type}"):
            for check in _check_device(device):
                reporter.write(checks=[check])


if __name__ == "__main__":
    # The package's folder, which Python has put first, holds modules and no packages.
    del sys.path[0]
    main()
    # All is said. torch's thread for a GPU's backward may still let go of Python objects, and where
    # the interpreter ends meanwhile it aborts: once in some thirty runs (Python 3.12, torch 2.11).
    os._exit(0)
