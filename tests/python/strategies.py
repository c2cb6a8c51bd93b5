"""Random problems, by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import cases
import torch
from cases import Case
from hypothesis import strategies as st


@st.composite
def small_problems(
    draw: st.DrawFn,
    head_dims: Sequence[int] = range(8, 80, 8),
    dtypes: Sequence[torch.dtype] = cases.DTYPES,
) -> tuple[Case, float]:
    """Any small problem and negl_prob: empty ones, odd ones, with and without skipping."""
    num_key_heads = draw(st.integers(1, 3))
    window = st.one_of(st.just(-1), st.integers(0, 150))
    case = Case(
        batch=draw(st.integers(0, 2)),
        query_length=draw(st.integers(0, 150)),
        key_length=draw(st.integers(0, 280)),
        head_dim=draw(st.sampled_from(head_dims)),
        num_heads=num_key_heads * draw(st.integers(1, 3)),
        num_key_heads=num_key_heads,
        dtype=draw(st.sampled_from(dtypes)),
        causal=draw(st.booleans()),
        window_size=(draw(window), draw(window)),
        scale=draw(st.one_of(st.none(), st.floats(-0.5, 0.5, width=16))),
        lse_grad=draw(st.booleans()),
        topics=draw(st.booleans()),
    )
    return case, draw(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 0.99]))
