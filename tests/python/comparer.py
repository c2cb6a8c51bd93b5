"""One bound for every comparison, and failures that explain themselves.

The bound: the relative L2 and the largest absolute error against float64 are at most twice those of
plain PyTorch in the same dtype, with a floor of eps(dtype) times the largest magnitude (float64:
1e-10 relative). Nothing else is tuned. Errors that analysis says are due pass, too (roundings()
below). That of P from an LSE that is kept in float32 always does, since all of a result may share
that one draw. That of sums does where there are so few rows that the yardstick can be small by
luck, and where the truth is itself no larger, as with one key: dP and delta cancel, dQ is zero.

The error of plain PyTorch is a draw: in float32 the largest error, often that of one row with a
large score, differs up to threefold between two equally good orders of summation. So the yardstick
is the worst of several shuffles of keys and head dims.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import oracle
import torch
from back_lite import reference
from cases import Case, Inputs, lse_dtype
from torch import Tensor

# Up to here what is due to sums counts. Of 3000 random small problems on two instruction sets, five
# results were over the yardstick (up to 150 rows): 300 problems would fail every other time.
FEW_ROWS = 4096

NUM_ORDERS = 16  # with 4, one in 900 results of a float32 twin of the yardstick failed


@dataclasses.dataclass(frozen=True)
class Errors:
    """Of a result against float64."""

    l2: float  # not divided by the norm of the truth, which may be zero
    largest: float

    @staticmethod
    def of(got: Tensor, truth: Tensor) -> Errors:
        if got.numel() == 0:
            return Errors(0.0, 0.0)
        difference = got.double() - truth
        return Errors(float(difference.norm()), float(difference.abs().max()))

    def times(self, factor: float) -> Errors:
        return Errors(factor * self.l2, factor * self.largest)

    def plus(self, other: Errors) -> Errors:
        return Errors(self.l2 + other.l2, self.largest + other.largest)

    def worst(self, other: Errors) -> Errors:
        return Errors(max(self.l2, other.l2), max(self.largest, other.largest))

    def within(self, bound: Errors) -> bool:
        return self.l2 <= bound.l2 and self.largest <= bound.largest


def relative_eps(dtype: torch.dtype) -> float:
    return 1e-10 if dtype == torch.float64 else torch.finfo(dtype).eps


def assert_close(
    name: str,
    got: Tensor,
    truth: Tensor,
    plain: Callable[[int], Tensor],
    *,
    dtype: torch.dtype,
    roundings: Callable[[bool], Errors] | None = None,
    has_few_rows: bool = False,
) -> None:
    """Checks got against the float64 truth; plain(order) is what PyTorch makes of it in the dtype.

    roundings(of_sums) tells what error is due whatever plain PyTorch draws. It, and orders after
    the first, are asked for only when needed.
    """
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)} != {tuple(truth.shape)}"
    finite = truth.isfinite()
    wrong_kind = (got.double() != truth) & ~finite | ~got.isfinite() & finite
    if wrong_kind.any():
        raise AssertionError(f"{name}: {_explain_non_finite(got, truth, wrong_kind)}")
    got, truth = got.masked_fill(~finite, 0.0), truth.masked_fill(~finite, 0.0)

    error = Errors.of(got, truth)
    floor = _size(truth).times(relative_eps(dtype))
    plain_error = Errors(0.0, 0.0)
    for order in range(NUM_ORDERS):
        in_order = plain(order).masked_fill(~finite, 0.0)
        if not in_order.isfinite().all():
            raise AssertionError(f"{name}: plain PyTorch overflows in {dtype}: no yardstick")
        plain_error = plain_error.worst(Errors.of(in_order, truth))
        bound = floor.worst(plain_error.times(2.0))
        if error.within(bound):
            return
    if roundings is not None:
        due_to_sums = roundings(True)
        of_sums = has_few_rows or _size(truth).within(due_to_sums)
        bound = bound.worst(due_to_sums if of_sums else roundings(False))
        if error.within(bound):
            return
    raise AssertionError(f"{name}: {_explain(got, truth, error, plain_error, bound)}")


def check_results(
    case: Case,
    inputs: Inputs,
    got: oracle.Results,
    *,
    live: Tensor | None = None,
    truth: oracle.Results | None = None,
) -> None:
    """All five results of a case; gradients are those of the live tiles."""
    truth = oracle.truth(case, inputs, live) if truth is None else truth
    expected_dtypes = oracle.Results(case.dtype, lse_dtype(case.dtype), *[case.dtype] * 3)

    @functools.cache
    def plain(order: int) -> oracle.Results:
        return oracle.plain(case, inputs, live, order)

    @functools.cache
    def roundings(of_sums: bool) -> tuple[Errors, ...]:
        """What the arithmetic inside (float32 or wider) costs; of_sums, rounding O for delta, too.

        P = exp(S - LSE) is off, relative to itself, by half a unit of LSE and one of exp, and by
        the error of S. A sum of n products, as S is one, is off by about sqrt(n) roundings of its
        terms (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).
        """
        q, k, v, _, _ = inputs
        units = 1.0 + _size(truth.lse[truth.lse.isfinite()]).largest / 2
        if of_sums:
            units += case.head_dim**0.5 * max(1.0, oracle.largest_score_terms(case, inputs))
            units += case.key_length**0.5
        inside = relative_eps(lse_dtype(case.dtype)) * units
        rounded_out = relative_eps(case.dtype) / 2 if of_sums else 0.0
        of_out = _size(reference.attention(q, k, v.abs(), **case.options)[0]).times(inside)
        of_lse = _size(torch.ones_like(truth.lse)).times(inside)
        return (
            of_out,
            of_lse,
            *(
                _size(terms).times(inside).plus(_size(of_delta).times(rounded_out))
                for terms, of_delta in zip(
                    oracle.uncancelled_grads(case, inputs, live),
                    oracle.grads_of_delta(case, inputs, live),
                    strict=True,
                )
            ),
        )

    num_rows = case.batch * case.num_heads * case.query_length
    for i, name in enumerate(got._fields):
        assert got[i].dtype == expected_dtypes[i], f"{case.id}: {name} is {got[i].dtype}"
        assert_close(
            f"{case.id}: {name}",
            got[i],
            truth[i],
            lambda order, i=i: plain(order)[i],
            dtype=case.dtype,
            roundings=lambda of_sums, i=i: roundings(of_sums)[i],
            has_few_rows=num_rows <= FEW_ROWS,
        )


def assert_same(a: oracle.Results, b: oracle.Results) -> None:
    """Equal to the last bit; NaN is equal to nothing."""
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert torch.equal(x, y), f"{name} differs by {float((x - y).abs().max())}"


def _size(tensor: Tensor) -> Errors:
    return Errors.of(tensor, torch.zeros_like(tensor))


def _place(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(flat_index % size)
        flat_index //= size
    return tuple(reversed(index))


def _explain_non_finite(got: Tensor, truth: Tensor, wrong: Tensor) -> str:
    first = _place(int(wrong.flatten().nonzero()[0]), got.shape)
    spread = " x ".join(str(int(n.shape[0])) for n in (i.unique() for i in wrong.nonzero().T))
    return (
        f"{int(wrong.sum())} of {got.numel()} values are NaN or infinite where they must not be, "
        f"or the reverse ({int(got.isnan().sum())} NaN, {int(got.isinf().sum())} inf); the first "
        f"is {float(got[first])} at {first}, not {float(truth[first])}; distinct indices by "
        f"dimension: {spread}"
    )


def _explain(got: Tensor, truth: Tensor, error: Errors, plain_error: Errors, bound: Errors) -> str:
    difference = (got.double() - truth).abs()
    worst = _place(int(difference.argmax()), got.shape)
    cosine = torch.nn.functional.cosine_similarity(got.double().flatten(), truth.flatten(), dim=0)
    norm = float(truth.norm()) or float("nan")
    return (
        f"L2 error {error.l2 / norm:.3g} relative (bound {bound.l2 / norm:.3g}, "
        f"plain PyTorch {plain_error.l2 / norm:.3g}), "
        f"largest error {error.largest:.3g} (bound {bound.largest:.3g}, "
        f"plain PyTorch {plain_error.largest:.3g}), at {worst} of {tuple(got.shape)}: "
        f"{float(got[worst]):.9g}, not {float(truth[worst]):.9g}; cosine {float(cosine):.6f}; "
        f"norm {float(got.double().norm()):.6g}, not {norm:.6g}"
    )
