"""Times cuDNN's attention forward, through torch, on the shapes of forward_probe.cu.

Usage: python sdpa.py [HEAD_DIM ...]. Run beside forward_probe, in one call on one machine: clocks
differ from machine to machine.
"""

import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def time_ms(function, warm_ms=150.0, measure_ms=240.0):
    """Median time of a call in a warm steady state, by CUDA events, in milliseconds."""
    for _ in range(3):  # the first call builds a plan, for up to a second
        function()
    torch.cuda.synchronize()
    times, spent = [], 0.0
    while spent < warm_ms + measure_ms:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        ms = begin.elapsed_time(end)
        spent += ms
        if spent > warm_ms:
            times.append(ms)
    return statistics.median(times)


def time_forward(batch, heads, length, head_dim, causal):
    """Prints milliseconds and TFLOP/s of one shape (bfloat16)."""
    query, key, value = (
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(
            1, 2
        )
        for _ in range(3)
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        ms = time_ms(
            lambda: torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal
            )
        )
    flops = 4 * batch * heads * length**2 * head_dim / (2 if causal else 1)
    print(
        f"CUDNN d{head_dim} B{batch} H{heads} S{length} {'causal' if causal else 'full'}: "
        f"{ms:.4f} ms {flops / ms * 1e-9:.1f} TFLOP/s",
        flush=True,
    )


def main():
    """Times 32768 tokens at several lengths, and a problem of few items: head dims in argv."""
    tokens = 32768
    for head_dim in [int(x) for x in sys.argv[1:]] or [128, 64]:
        for length in (2048, 8192, 16384, 32768):
            for causal in (False, True):
                time_forward(tokens // length, 2048 // head_dim, length, head_dim, causal)
        time_forward(1, 8, 4096, head_dim, causal=False)


if __name__ == "__main__":
    main()
