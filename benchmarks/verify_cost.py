"""What watching costs: CPU seconds of a watched step beside an unwatched one, on each of two data ranks.

    python -m benchmarks.verify_cost                     a model of 20 M parameters; a minute on two cores
    python -m benchmarks.verify_cost --profile           and where the watcher spends them, on rank 0

CPU time of the process, and not the clock, for the machine may be busy with other things. Steps are the same but for
their data. Ranks run under DDP in fp32 on gloo, with one thread each.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isograd.comm.launch import World
from isograd.verify.watch.capture import Capture

VOCABULARY, HIDDEN, LAYERS = 4096, 512, 6
WATCHED = 3


class Model(nn.Module):
    """A decoder of 21 M parameters in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        block = partial(nn.TransformerEncoderLayer, HIDDEN, 8, 4 * HIDDEN, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(block(norm_first=True) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.embed.weight)


def run(tokens: int, steps: int, parameters: bool, profile: bool) -> tuple[list[float], int, str]:
    """(CPU seconds of each step, the first ones watched; parameters; where the watcher spends its time)."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own = torch.Generator().manual_seed(dist.get_rank())
    seconds: list[float] = []
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as home, Capture(home, steps=WATCHED, parameters=parameters):
        for step in range(WATCHED + steps):
            began = time.process_time()
            if profile and step == 1:
                profiler.enable()
            text = torch.randint(VOCABULARY, (4, tokens // 4 + 1), generator=own)
            F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if profile and step == 1:
                profiler.disable()
            seconds.append(time.process_time() - began)
        size = sum(path.stat().st_size for path in Path(home).rglob("step-0001.safetensors"))
    said = ""
    if profile:
        with tempfile.NamedTemporaryFile("w+") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(18)
            file.seek(0)
            said = file.read()
    return seconds, size, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank and step (default 1024)")
    parser.add_argument("--steps", type=int, default=6, help="unwatched ones (default 6)")
    parser.add_argument("--parameters", action="store_true", help="record parameters, too, as for a comparison")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with World(2) as world:
        found = world.run(partial(run, options.tokens, options.steps, options.parameters, options.profile))
    for rank, (seconds, size, _) in enumerate(found):
        watched, after = seconds[1:WATCHED], seconds[WATCHED + 1 :]
        ratio = statistics.median(watched) / statistics.median(after)
        told = ", ".join(f"{s:.2f}" for s in seconds)
        print(
            f"rank {rank}: a watched step takes {ratio:.2f} x the CPU time of an unwatched one; s: {told}; {size} bytes"
        )
    print(found[0][2])


if __name__ == "__main__":
    main()
