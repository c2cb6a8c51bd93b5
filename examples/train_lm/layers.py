"""How many tiles each layer of a trained model skips, and what that does to its gradients.

    python -m examples.train_lm.layers --checkpoint demo/checkpoint.pt

Windows of text that the model has not seen; all of a layer's heads and windows count as one long
gradient. Writes JSON to --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from .arguments import device, make_folder, probability, whole
from .compare import compare_layers, layer_errors, record_calls
from .model import load_trained
from .report import write_json
from .text import read, windows

VALUES = (0.01, 0.02, 0.05, 0.1, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm.layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/checkpoint.pt"))
    parser.add_argument("--run", type=probability, default=0.0, help="its negl_prob (%(default)s)")
    parser.add_argument("--windows", type=whole(1), default=4, help="of text (%(default)s)")
    parser.add_argument(
        "--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=Path("build/layers.json"))
    args = parser.parse_args()
    make_folder("--out", args.out.parent)
    model, settings = load_trained(args.checkpoint, args.run, args.device)
    text = read(settings["corpus"]).validation
    context = settings["context"]
    starts = torch.linspace(0, len(text) - context - 1, args.windows).long()[:, None]
    bar = tqdm([windows(text, start, context, args.device) for start in starts], "windows")
    layers = compare_layers((record_calls(model, window) for window in bar), VALUES)
    content = {"settings": {**settings, "negl_prob": args.run, "windows": args.windows}}
    write_json(args.out, {**content, "layers": [layer_errors(found) for found in layers]})


if __name__ == "__main__":
    main()
