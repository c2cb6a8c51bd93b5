"""What users call: the module :class:`BackLite` and the function :func:`attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn

from . import _checks, _dispatch, _thresholds, _verbose
from .tiles import tile_stats_shape

#: What tells the density of a call: tile bits (None: the backward is exact), query's and key's
#: shape, causal and the checked window.
_Call = tuple[Tensor | None, torch.Size, torch.Size, bool, tuple[int, int]]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: Tensor | None,
    num_thresholds: int,
    scale: float | None,
    return_softmax_lse: bool,
    tile_stats: Tensor | None,
    causal: bool,
    window_size: Sequence[int],
    deterministic: bool | None,
    is_eager: bool,
) -> tuple[Tensor | tuple[Tensor, Tensor], _Call | None]:
    """Check, cast, choose what to record, run; return the result and what tells the density.

    (None where it cannot be read.)

    ``negl_prob`` is in fixed point; None is exact. ``num_thresholds`` is how many it holds, 1 if
    that is left to the library to find out.
    """
    device_type = "cuda" if isinstance(query, Tensor) and query.is_cuda else "cpu"
    dtype = _dispatch.autocast_dtype(device_type)
    if dtype is not None:
        query, key, value = (_autocast(x, device_type, dtype) for x in (query, key, value))
    is_direct = is_eager and _dispatch.is_direct(query, key, value)
    shape, key_shape = _checks.check_inputs(query, key, value, are_plain=is_direct)
    scale, window = _checks.check_options(scale, causal, window_size, deterministic)
    if num_thresholds != 1 and num_thresholds != shape[2]:
        raise _thresholds.wrong_count(num_thresholds, shape[2])
    if tile_stats is not None:
        _checks.check_tile_stats(tile_stats, tile_stats_shape(query, key), query.device)
    if negl_prob is not None and negl_prob.device != query.device:
        raise ValueError(
            f"negl_prob.device = {negl_prob.device}: accepted is query's, {query.device}; a "
            "module moves with module.to(), from the meta device with module.to_empty()"
        )
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (not is_direct and _dispatch.hides_gradients())
    )
    if not needs_grad:
        negl_prob = None
    elif device_type == "cuda":
        _checks.check_deterministic(deterministic, may_warn=is_eager)
    verbose = is_eager and _verbose.is_on(query)
    record = tile_stats is not None or (verbose and negl_prob is not None)
    outputs = _dispatch.call_attention(
        is_direct,
        needs_grad,
        return_softmax_lse,
        query,
        key,
        value,
        negl_prob,
        scale,
        causal,
        window[0],
        window[1],
        record,
    )
    if tile_stats is not None:
        tile_stats.copy_(outputs[-1])
    tile_bits = None if negl_prob is None else outputs[2]
    if verbose:
        recorded = outputs[-1] if record else None
        _verbose.log_call(query, key, causal, window, recorded, tile_bits)
    is_readable = is_direct or (is_eager and _dispatch.is_readable(query))
    call = (tile_bits, shape, key_shape, causal, window) if is_readable else None
    return (outputs[0], outputs[1]) if return_softmax_lse else outputs[0], call


def _autocast(tensor: Tensor, device_type: str, dtype: torch.dtype) -> Tensor:
    # As torch's own operators do it: float64 keeps its precision. What is no tensor or on another
    # device is refused later, by name. Nor is it worth a call (2 us of the host) where nothing is
    # to be cast.
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype != dtype
        and tensor.dtype != torch.float64
        and tensor.is_floating_point()
        and tensor.device.type == device_type
    ):
        return tensor.to(dtype)
    return tensor


if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Options(TypedDict, total=False):
        scale: float | None
        tile_stats: Tensor | None
        causal: bool
        window_size: Sequence[int]
        deterministic: bool | None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: float | Sequence[float] | Tensor = ...,
    *,
    return_softmax_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: float | Sequence[float] | Tensor = ...,
    *,
    return_softmax_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: float | Sequence[float] | Tensor = ...,
    *,
    return_softmax_lse: bool,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    negl_prob: float | Sequence[float] | Tensor = 0.0,
    *,
    scale: float | None = None,
    return_softmax_lse: bool = False,
    tile_stats: Tensor | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention: exact in the forward, skipping negligible tiles in the backward.

    Shapes: B = batch, H = query heads, Hk = key heads (Hk divides H), Sq, Sk = lengths,
    D = head_dim, a multiple of 8 from 8 to 256.

    Args:
        query: ``(B, Sq, H, D)``: float16, bfloat16, float32 or float64; any strides. Inside
            ``torch.autocast`` all but float64 is cast to the autocast dtype. On CUDA: float16 or
            bfloat16, D 64 or 128, on a Hopper GPU (H100, H200).
        key: ``(B, Sk, Hk, D)`` of the same dtype.
        value: like key.
        negl_prob: from 0 to below 1; one for all heads, or H of them. Of the probability of each
            query tile (the mean of its 64 rows), less than this is skipped by the backward; 0 is
            exact. Under ``torch.compile`` give a tensor, or use :class:`BackLite`: a float is a
            constant there, and compiles again when it changes.
        scale: multiplies ``query @ key^T``; by default ``1 / sqrt(D)``.
        return_softmax_lse: also return the LSE.
        tile_stats: a float32 buffer of :func:`back_lite.tile_stats_shape` that receives how much
            probability each tile holds.
        causal: query i sees key j only if ``j <= i + Sk - Sq``.
        window_size: ``(left, right)``: query i sees key j only if
            ``i + Sk - Sq - left <= j <= i + Sk - Sq + right``; -1 is unlimited. Intersects causal.
        deterministic: None follows ``torch.use_deterministic_algorithms``. The CPU backend always
            repeats its results bit by bit; on CUDA only the forward does, and True is refused where
            a gradient is wanted.

    Returns:
        out ``(B, Sq, H, D)`` of query's dtype; with ``return_softmax_lse``, ``(out, lse)``: lse
        ``(B, H, Sq)`` is the natural log of the sum of exponentials, float32 (float64 for float64
        inputs), differentiable. A query that sees no key has out 0, lse -inf and no gradient.

    Raises:
        TypeError, ValueError: an argument is not one of those above.
        NotImplementedError: there is no backend for the tensors' device, or it does not serve them.
    """
    _checks.check_flag("return_softmax_lse", return_softmax_lse)
    fixed: Tensor | None = None
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    if isinstance(negl_prob, Tensor) and (
        _dispatch.is_compiling() or type(negl_prob) is not Tensor or not negl_prob.is_cpu
    ):  # not to be read on the host
        fixed = _thresholds.fixed_point_of_tensor(negl_prob)
        if negl_prob.is_cpu:
            fixed = fixed.to(device, non_blocking=True)
        num_thresholds = fixed.shape[0]
    else:
        thresholds = _thresholds.parse(negl_prob)
        num_thresholds = _thresholds.count(thresholds)
        if _thresholds.skips(thresholds):
            fixed = _thresholds.fixed_point(thresholds, device)
    result, _ = _attend(
        query,
        key,
        value,
        fixed,
        num_thresholds,
        scale,
        return_softmax_lse,
        tile_stats,
        causal,
        window_size,
        deterministic,
        not _dispatch.is_compiling(),
    )
    return result


class _LastCall:
    """What the last call of a module kept for :attr:`BackLite.last_density`; not copied with it."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        #: None before the first call
        self.kept: _Call | None = None

    def __reduce__(self) -> tuple[type[_LastCall], tuple[()]]:
        return _LastCall, ()


class BackLite(nn.Module):
    """Attention with an exact forward and a backward that skips negligible tiles.

    ::

        attn = BackLite(negl_prob=0.05)
        out = attn(query, key, value, causal=True)
        out, lse = attn(query, key, value, return_softmax_lse=True)
        attn.negl_prob = 0.1                       # at any time; also one per head

    Args:
        negl_prob: from 0 to below 1; one for all heads, or one for each query head (up to 1024).
            Of the probability of each query tile (the mean of its 64 rows), less than this is
            skipped by the backward. 0 is exact, and records nothing.
        deterministic: None follows ``torch.use_deterministic_algorithms``. The CPU backend always
            repeats its results bit by bit; on CUDA only the forward does, and True is refused where
            a gradient is wanted.

    Raises:
        TypeError, ValueError: ``negl_prob`` is not one of those above.

    ``negl_prob`` is configuration and not a weight: it is not in the ``state_dict``.
    """

    def __init__(
        self,
        negl_prob: float | Sequence[float] | Tensor = 0.0,
        *,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        _checks.check_options(None, False, (-1, -1), deterministic)
        self.deterministic = deterministic
        self._last_call = _LastCall()
        # Compiled code reads the thresholds from here, so that a change needs no new compilation.
        # Not a buffer: DistributedDataParallel sends those of rank 0 to the others at every step.
        with torch.inference_mode(False):  # or it could not be filled again outside inference mode
            self._negl_prob_table = torch.empty(_thresholds.TABLE_SIZE, dtype=torch.int64)
        # The same on other devices from which query came: a module without weights need not be
        # moved. Filled in place, so that a captured CUDA graph follows a change.
        self._twin_tables: dict[torch.device, Tensor] = {}
        self.negl_prob = negl_prob

    @property
    def negl_prob(self) -> float | Tensor:
        """The threshold: a float, or a float64 tensor of one per head. May be set at any time.

        Under ``torch.compile``, only a change between zero (for all heads) and non-zero compiles
        again.
        """
        if isinstance(self._thresholds, tuple):
            return torch.tensor(self._thresholds, dtype=torch.float64, device="cpu")
        return self._thresholds

    @negl_prob.setter
    def negl_prob(self, negl_prob: float | Sequence[float] | Tensor) -> None:
        thresholds = _thresholds.parse(negl_prob)
        skips = _thresholds.skips(thresholds)
        with torch.inference_mode(False):
            fixed = _thresholds.fixed_point(thresholds, torch.device("cpu")) if skips else None
        for table in (self._negl_prob_table, *self._twin_tables.values()):
            _thresholds.fill_table(table, thresholds)
        self._thresholds: _thresholds.Thresholds = thresholds
        self._skips = skips
        # What calls on the CPU read, in one assignment: one that another thread makes meanwhile, or
        # that an interrupt comes before, sees all of the old thresholds or all of the new.
        self._host_thresholds = fixed, _thresholds.count(thresholds)

    def _table_for(self, query: Tensor) -> Tensor:
        """Return the table of thresholds on the device of ``query``."""
        table = self._negl_prob_table
        if not isinstance(query, Tensor) or (query.is_cpu and table.is_cpu):
            return table
        device = query.device
        if table.device == device or device.type not in ("cpu", "cuda"):
            return table
        twin = self._twin_tables.get(device)
        if twin is None:
            if _dispatch.is_compiling():
                return table.to(device, non_blocking=True)
            twin = self._make_twin_table(device)
        return twin

    def _make_twin_table(self, device: torch.device) -> Tensor:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "back_lite: the first call of a module on a device must not be captured in a CUDA "
                "graph; call it once before, or move it there with module.to()"
            )
        with torch.inference_mode(False):
            twin = torch.empty(_thresholds.TABLE_SIZE, dtype=torch.int64, device=device)
        _thresholds.fill_table(twin, self._thresholds)
        if type(twin) is Tensor:  # not a fake one
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # once, for calls on other streams
            self._twin_tables[device] = twin
        return twin

    @property
    def last_density(self) -> float | None:
        """Live tiles / tiles that the mask allows, in the last call; computed when asked for.

        None before the first call; 1.0 if that call recorded nothing. Reads from the device. Calls
        from compiled code (``torch.compile``) do not count, and after one inside a transform of
        ``torch.func`` or on fake tensors, whose tiles cannot be read, it is None.
        """
        if self._last_call.kept is None:
            return None
        tile_bits, query_shape, key_shape, causal, window = self._last_call.kept
        if tile_bits is None:
            return 1.0
        return _verbose.density(tile_bits, query_shape, key_shape, causal, window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        return_softmax_lse: bool = False,
        tile_stats: Tensor | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention; see :func:`back_lite.attention` for arguments, results and errors."""
        if return_softmax_lse is not True and return_softmax_lse is not False:
            _checks.check_flag("return_softmax_lse", return_softmax_lse)
        is_eager = not _dispatch.is_compiling()
        if is_eager:
            thresholds, count = self._host_thresholds
            if thresholds is not None and not (isinstance(query, Tensor) and query.is_cpu):
                thresholds = self._table_for(query)
        else:
            # The count is not a constant of compiled code; there the library compares.
            thresholds, count = self._table_for(query) if self._skips else None, 1
        result, call = _attend(
            query,
            key,
            value,
            thresholds,
            count,
            scale,
            return_softmax_lse,
            tile_stats,
            causal,
            window_size,
            self.deterministic,
            is_eager,
        )
        if is_eager:  # torch.utils.checkpoint refuses to compile a mutation
            self._last_call.kept = call
        return result

    def extra_repr(self) -> str:
        """Describe the options, for ``repr``."""
        return f"negl_prob={self._thresholds}, deterministic={self.deterministic}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_twin_tables": {}}  # made anew where a copy is used

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BackLite:
        apply: Callable[..., Any] = super()._apply
        apply(fn, recurse)
        with torch.no_grad():
            self._negl_prob_table = fn(self._negl_prob_table)
        # to_empty() leaves the table without values.
        _thresholds.fill_table(self._negl_prob_table, self._thresholds)
        return self
