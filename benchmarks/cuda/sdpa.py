"""Times cuDNN's attention forward, through torch, on the shapes of forward_probe.cu.

Run beside forward_probe, in one call on one machine: clocks differ from machine to machine.
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


def main():
    """Prints TFLOP/s of every shape: head dims in argv."""
    head_dims = [int(x) for x in sys.argv[1:]] or [128, 64]
    tokens = 32768
    for head_dim in head_dims:
        for length in (2048, 8192, 16384, 32768):
            batch, heads = tokens // length, 2048 // head_dim
            query, key, value = (
                torch.randn(
                    batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16
                ).transpose(1, 2)
                for _ in range(3)
            )
            for causal in (False, True):
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    ms = time_ms(
                        lambda q=query, k=key, v=value, c=causal: (
                            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=c)
                        )
                    )
                flops = 4 * batch * heads * length**2 * head_dim / (2 if causal else 1)
                print(
                    f"CUDNN d{head_dim} S{length} {'causal' if causal else 'full'}: "
                    f"{ms:.4f} ms {flops / ms * 1e-9:.1f} TFLOP/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
