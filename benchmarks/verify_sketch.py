"""How large a recording by sketches alone is: of a Llama-like model of 1.1 B parameters in fp32, one step of a rank.

    python -m benchmarks.verify_sketch                   one tensor in memory at a time; a few minutes
    python -m benchmarks.verify_sketch --layers 2        a small model

The watcher's own code keeps and writes what it keeps of a gradient, of a parameter before and after the step, and of
what each micro-batch added; tensors are random. A data-parallel rank holds all of them, so it writes as much.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from isograd_verify.record.sketch import SMALL, sketch
from isograd_verify.watch.capture import Capture

VOCABULARY, HIDDEN, INNER = 32000, 2048, 5632
LAYER = {
    "norm1": (HIDDEN,), "norm2": (HIDDEN,), "q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN),
    "o": (HIDDEN, HIDDEN), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--micros", type=int, default=2, help="micro-batches (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = {f"blocks.{i}.{name}.weight": shape for i in range(options.layers) for name, shape in LAYER.items()}
    ends = {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,), "head": (VOCABULARY, HIDDEN)}
    shapes |= {f"{name}.weight": shape for name, shape in ends.items()}
    count, seconds = 0, 0.0
    with tempfile.TemporaryDirectory() as home:
        capture = Capture(home, steps=1, beyond=SMALL)
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.randn(shape))
            count += parameter.numel()
            began = time.process_time()
            capture.micro = 0
            for capture.micro in range(options.micros):
                capture.contribution(name, parameter)
            for kind in ("final", "parameter", "after"):
                capture.keep(f"{kind}/{name}", parameter, parameter)
            for kind in ("sum", "clipped"):
                capture.tensors[f"{kind}/{name}"] = sketch(parameter)
            seconds += time.process_time() - began
        capture.out.tensors(1, capture.tensors)
        size = sum(path.stat().st_size for path in Path(home).rglob("*") if path.is_file())
    kinds: Counter[str] = Counter()
    for name, tensor in capture.tensors.items():
        kind, rest, *_ = name.split("/")
        kinds["along/part" if kind == "along" and rest.isdigit() else f"along/{rest}" if kind == "along" else kind] += (
            tensor.nbytes
        )
    print(f"{count} parameters, {options.micros} micro-batches: {size / 1e6:.1f} MB, {seconds:.0f} s of CPU time")
    for kind, found in kinds.most_common():
        print(f"  {kind}: {found / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
