"""Times cuDNN's attention backward, through torch, on the shapes of backward_probe.cu.

Usage: python sdpa_backward.py HEAD_DIM LENGTH... Run beside backward_probe, in one call on one
machine: clocks differ from machine to machine.
"""

import sys

import torch
from sdpa import time_ms
from torch.nn.attention import SDPBackend, sdpa_kernel


def main():
    """Prints milliseconds and TFLOP/s of every length, full and causal."""
    head_dim = int(sys.argv[1])
    tokens = 32768
    for length in (int(x) for x in sys.argv[2:]):
        batch, heads = tokens // length, 2048 // head_dim
        for causal in (False, True):
            inputs = [
                torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
                .transpose(1, 2)
                .requires_grad_()
                for _ in range(3)
            ]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
                grad = torch.randn_like(out)
                ms = time_ms(
                    lambda o=out, i=inputs, g=grad: torch.autograd.grad(o, i, g, retain_graph=True),
                    warm_ms=100.0,
                    measure_ms=160.0,
                )
            flops = 10 * batch * heads * length**2 * head_dim / (2 if causal else 1)
            print(
                f"CUDNN d{head_dim} S{length} {'causal' if causal else 'full'}: "
                f"{ms:.4f} ms {flops / ms * 1e-9:.1f} TFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
