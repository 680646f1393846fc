"""How large a recording by sketches alone is: a Llama-like model of 1.1 B parameters, one real step, watched.

    python -m benchmarks.verify_sketch                   10 GB of memory, fp32, two micro-batches
    python -m benchmarks.verify_sketch --layers 2        a small one

A rank of a data-parallel world writes as much. Tokens are few: sizes do not depend on them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.verify.record.projection import SMALL
from isograd.verify.record.recording import Recording
from isograd.verify.watch.capture import Capture

VOCABULARY, HIDDEN, INNER, HEADS = 32000, 2048, 5632, 32


class Block(nn.Module):
    """A decoder's layer, with every matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )  # [batch, heads, tokens, features]
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """An embedding, layers, a norm and a head that is not tied."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--micros", type=int, default=2, help="micro-batches (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(options.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as home:
        began = time.process_time()
        with Capture(home, steps=1, beyond=SMALL):
            for _ in range(options.micros):
                text = torch.randint(VOCABULARY, (1, 9))
                F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
        seconds = time.process_time() - began
        size = sum(path.stat().st_size for path in Path(home).rglob("*") if path.is_file())
        kinds: Counter[str] = Counter()
        for name, tensor in Recording(home).ranks[0].tensors(1).items():
            kind, _, rest = name.partition("/")
            kinds[f"along/{rest.partition('/')[0]}" if kind == "along" else kind] += tensor.nbytes
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, {options.micros} micro-batches: {size / 1e6:.1f} MB, {seconds:.0f} s of CPU time")
    for kind, found in kinds.most_common():
        print(f"  {kind}: {found / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
