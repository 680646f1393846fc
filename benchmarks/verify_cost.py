"""What watching costs: watched, unwatched and plain steps in turn, on two data ranks.

    python -m benchmarks.verify_cost                     a model of 21 M parameters; some minutes on two quiet cores
    python -m benchmarks.verify_cost --record            whole gradients and parameters are written, as for `compare`
    python -m benchmarks.verify_cost --sketch            their sketches are
    python -m benchmarks.verify_cost --profile           and where the watcher spends its time, on rank 0, also in
                                                         later steps

A round is plain steps (nobody watches), watched steps, and steps after them, when all hooks but the counting ones are
out. Each is told as the median over rounds of the clock and of the process's CPU time, which other programs on the
machine disturb less. Ranks run under DDP in fp32 on gloo, with one thread each.
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

from isograd.launcher.launch import World
from isograd_verify.record.sketch import SMALL
from isograd_verify.watch.capture import Capture

VOCABULARY, HIDDEN, LAYERS = 4096, 512, 6


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


def run(
    tokens: int, rounds: int, each: int, record: bool, sketch: bool, profile: bool
) -> tuple[dict[str, list[tuple[float, float]]], int, str]:
    """(by kind of step: its seconds by the clock and of CPU time; bytes of a step's file; where the time goes)."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own = torch.Generator().manual_seed(dist.get_rank())
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "watched": [], "unwatched": []}
    profiler, later, size = cProfile.Profile(), cProfile.Profile(), 0

    def step(kind: str) -> None:
        dist.barrier()
        began = time.perf_counter(), time.process_time()
        text = torch.randint(VOCABULARY, (4, tokens // 4 + 1), generator=own)
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind:
            seconds[kind].append((time.perf_counter() - began[0], time.process_time() - began[1]))

    step("")  # the first one makes DDP's buckets and the optimizer's state
    for number in range(rounds):
        for _ in range(each):
            step("plain")
        with (
            tempfile.TemporaryDirectory() as home,
            Capture(home, steps=each, parameters=record, beyond=SMALL if sketch else None),
        ):
            if profile and number == 0:
                profiler.enable()
            for _ in range(each):
                step("watched")
            profiler.disable()
            step("")  # the hooks are taken out behind it
            if profile and number == 1:
                later.enable()
            for _ in range(each):
                step("unwatched")
            later.disable()
            size = sum(path.stat().st_size for path in Path(home).rglob("step-0001.safetensors"))
    said = ""
    if profile:
        with tempfile.NamedTemporaryFile("w+") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(22)
            file.seek(0)
            said = file.read()
        whole = own = 0.0
        for entry in later.getstats():
            whole += entry.inlinetime
            own += entry.inlinetime * ("isograd_verify" in getattr(entry.code, "co_filename", ""))
        said += f"{each} later steps: {whole:.3f} s, of which {own * 1000:.2f} ms in the watcher's own functions\n"
    return seconds, size, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank and step (default 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--each", type=int, default=3, help="steps of each kind in a round (default 3)")
    parser.add_argument("--record", action="store_true", help="whole tensors, as `verify run --record` writes them")
    parser.add_argument("--sketch", action="store_true", help="sketches in their place")
    parser.add_argument("--profile", action="store_true")
    o = parser.parse_args()
    with World(2) as world:
        found = world.run(partial(run, o.tokens, o.rounds, o.each, o.record or o.sketch, o.sketch, o.profile))
    for rank, (seconds, size, _) in enumerate(found):
        for clock, name in enumerate(("clock", "CPU time")):
            middle = {kind: statistics.median(one[clock] for one in steps) for kind, steps in seconds.items()}
            told = ", ".join(f"{kind} {value:.3f} s ({value / middle['plain']:.3f})" for kind, value in middle.items())
            print(f"rank {rank}, {name}: {told}; {size} bytes a step")
    print(found[0][2])


if __name__ == "__main__":
    main()
