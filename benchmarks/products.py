"""fp32 products of linear maps by torch's own choice (MKL) and by oneDNN: the table that isograd/matmul.py chose from.

    python -m benchmarks.products                # one thread; seconds
    python -m benchmarks.products --threads 2

A row is a map of some inputs to some outputs for some tokens: its forward x @ weight.t(), the gradient of its input
dy @ weight, and dy.t() @ x added to the gradient of its weight. Numbers are GFLOP/s, medians over interleaved
repetitions; "time" is oneDNN's by torch's own. oneDNN was called for each shape before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product

import torch
from rich.console import Console
from rich.table import Table

from isograd import matmul

MAPS = ((128, 128), (384, 384), (384, 1024), (1024, 384), (384, 8192), (1024, 4096))  # inputs, outputs
TOKENS = (64, 256, 512, 2048)
WAYS = ("forward", "back", "added")


def seconds(contestants: dict[str, Callable[[], object]], repetitions: int = 40) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repetitions + 3):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[3:]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    words = "not taken on this machine"
    if matmul._faster():
        words = f"taken from {matmul.LEAST / 1e6:.1f} M multiplications" + ", to add, too" * matmul._twice()
    table = Table(title=f"fp32 products, {torch.get_num_threads()} thread(s); oneDNN is {words}")
    for heading in ("tokens", "inputs", "outputs", *(h for way in WAYS for h in (way, "oneDNN", "time"))):
        table.add_column(heading, justify="right")
    for tokens, (inputs, outputs) in product(TOKENS, MAPS):
        x, dy, weight = torch.randn(tokens, inputs), torch.randn(tokens, outputs), torch.randn(outputs, inputs)
        total = torch.zeros(outputs, inputs)
        found = seconds(
            {
                "forward": lambda x=x, w=weight: x @ w.t(),
                "forward, oneDNN": lambda x=x, w=weight: matmul._times_transposed(x, w, None),
                "back": lambda g=dy, w=weight: g @ w,
                "back, oneDNN": lambda g=dy, w=weight: matmul._times_transposed(g, w.t(), None),
                "added": lambda s=total, g=dy, x=x: s.addmm_(g.t(), x),
                "added, oneDNN": lambda s=total, g=dy, x=x: matmul._add(s, g.t(), x.t()),
            }
        )
        rates = {name: 2e-9 * tokens * inputs * outputs / taken for name, taken in found.items()}
        cells = [f"{tokens}", f"{inputs}", f"{outputs}"]
        for way in WAYS:
            own, other = rates[way], rates[f"{way}, oneDNN"]
            cells += [f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"]
        table.add_row(*cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
