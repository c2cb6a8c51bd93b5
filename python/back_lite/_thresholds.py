"""Thresholds on their way to the library: fixed point, int64, ``floor(negl_prob * 2**40)``.

Integers make the selection the same whatever the order of its sums, and ``module.half()`` leaves
them alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from . import _dispatch
from ._library import max_table_heads

FRACTION_BITS = 40
TABLE_SIZE = max_table_heads + 1
_ACCEPTED = "accepted are numbers from 0 to below 1, one for all heads or one for each"

#: One threshold for all heads, or one for each.
Thresholds = float | tuple[float, ...]


def parse(negl_prob: float | Sequence[float] | Tensor) -> Thresholds:
    """Check thresholds and bring them into one of two forms. A tensor is read on the host.

    Raises:
        TypeError: not a number, a sequence of numbers or a tensor of them.
        NotImplementedError: a transform of torch.func maps over it.
        ValueError: a threshold outside [0, 1), NaN, or more of them than a table holds.
    """
    if isinstance(negl_prob, Real):
        return _checked(negl_prob, "negl_prob")
    if isinstance(negl_prob, Tensor):
        if negl_prob.is_meta:
            raise ValueError(f"negl_prob.device = meta: {_ACCEPTED}")
        if torch._C._functorch.is_batchedtensor(negl_prob):
            raise NotImplementedError("negl_prob is mapped over: accepted is one for all calls")
        if negl_prob.dim() > 1:
            raise ValueError(f"negl_prob.shape = {tuple(negl_prob.shape)}: {_ACCEPTED}")
        if negl_prob.dim() == 0:
            return _checked(negl_prob.item(), "negl_prob")
        negl_prob = negl_prob.tolist()
    if isinstance(negl_prob, str) or not isinstance(negl_prob, Sequence):
        raise TypeError(f"negl_prob = {negl_prob!r}: {_ACCEPTED}")
    if not 1 <= len(negl_prob) <= max_table_heads:
        raise ValueError(
            f"negl_prob has {len(negl_prob)} entries: accepted are 1 to {max_table_heads}"
        )
    values = tuple(_checked(value, f"negl_prob[{i}]") for i, value in enumerate(negl_prob))
    return values[0] if len(values) == 1 else values


def _checked(value: object, name: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} = {value!r}: {_ACCEPTED}")
    number = float(value)
    if not 0.0 <= number < 1.0:  # NaN fails as well
        raise ValueError(f"{name} = {number}: {_ACCEPTED}")
    return number


def _fixed(value: float) -> int:
    return math.floor(math.ldexp(value, FRACTION_BITS))


def skips(thresholds: Thresholds) -> bool:
    """Tell whether any head may skip a tile."""
    values = thresholds if isinstance(thresholds, tuple) else (thresholds,)
    return any(_fixed(value) > 0 for value in values)


def count(thresholds: Thresholds) -> int:
    """Return 1, or how many heads have one of their own."""
    return len(thresholds) if isinstance(thresholds, tuple) else 1


def wrong_count(given: int, num_heads: int) -> ValueError:
    """Say that there are neither one threshold nor one per head."""
    return ValueError(
        f"negl_prob has {given} entries: accepted are 1, or one for each of the {num_heads} query "
        "heads"
    )


def fixed_point(thresholds: Thresholds, device: torch.device | None) -> Tensor:
    """Make an int64 tensor of one entry, or of one per head; on a GPU without waiting for it."""
    values = thresholds if isinstance(thresholds, tuple) else (thresholds,)
    fixed = [_fixed(value) for value in values]
    if device is None or device.type != "cuda":
        return torch.tensor(fixed, dtype=torch.int64, device=device)
    if len(fixed) == 1:
        return torch.full((1,), fixed[0], dtype=torch.int64, device=device)
    if not _dispatch.is_compiling() and torch.cuda.is_current_stream_capturing():
        # A copy would be made again at every replay, from memory that is gone by then.
        parts = [torch.full((1,), value, dtype=torch.int64, device=device) for value in fixed]
        return torch.cat(parts)
    return torch.tensor(fixed, dtype=torch.int64).to(device, non_blocking=True)


def fixed_point_of_tensor(negl_prob: Tensor) -> Tensor:
    """Convert a float tensor of one entry, or of one per head, without reading it on the host.

    An entry that is not a threshold, NaN included, becomes a number that the library refuses on the
    CPU. On CUDA nothing looks at it: one below 0 counts as 0.

    Raises:
        TypeError: not of a floating-point dtype.
        ValueError: more than one dimension, or more entries than a table holds.
    """
    if not negl_prob.dtype.is_floating_point:
        raise TypeError(f"negl_prob.dtype = {negl_prob.dtype}: accepted are floating-point types")
    if negl_prob.dim() > 1:
        raise ValueError(f"negl_prob.shape = {tuple(negl_prob.shape)}: {_ACCEPTED}")
    if negl_prob.numel() > max_table_heads:
        raise ValueError(
            f"negl_prob has {negl_prob.numel()} entries: accepted are 1 to {max_table_heads}"
        )
    scaled = negl_prob.detach().to(torch.float64).reshape(-1) * 2.0**FRACTION_BITS
    return scaled.floor().nan_to_num(nan=-1.0).to(torch.int64)


# How many thresholds the tables on GPUs hold, by address: the library cannot look without waiting.
_counts: dict[int, int] = {}


def check_cuda_table(table: Tensor, num_heads: int) -> None:
    """Refuse a table on a GPU that holds a wrong number of thresholds; compiled code asks late."""
    given = _counts.get(table.data_ptr(), 1)
    if given != 1 and given != num_heads and table.shape[0] == TABLE_SIZE:
        raise wrong_count(given, num_heads)


def fill_table(table: Tensor, thresholds: Thresholds) -> None:
    """Write thresholds into a module's table, int64 ``(TABLE_SIZE,)``, in place.

    The table has one shape whatever it holds, so that compiled code need not be compiled again when
    one threshold for all heads becomes one for each. One for all fills it; one for each leaves -1
    behind the last, by which the library finds a wrong number of them. Nothing waits for a GPU.
    """
    if table.is_cuda and type(table) is Tensor:
        address = table.data_ptr()
        if address not in _counts:  # another tensor may be there later, a copy in compiled code
            weakref.finalize(table, _counts.pop, address, None).atexit = False
        _counts[address] = count(thresholds)
    if isinstance(thresholds, tuple):
        # In one copy, so that nothing comes between two halves of it.
        row = torch.full((TABLE_SIZE,), -1, dtype=torch.int64, device="cpu")
        row[: len(thresholds)] = fixed_point(thresholds, torch.device("cpu"))
        table.copy_(row, non_blocking=True)
    else:
        table.fill_(_fixed(thresholds))
