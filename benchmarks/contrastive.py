"""Contrastive steps beside sentence-transformers' cached loss and the plain full batch: time, peak memory, its growth.

    python -m benchmarks.contrastive                         # one process and 2 gloo ranks, some minutes on two cores
    python -m benchmarks.contrastive --memory                # 256 to 16,384 rows; draws docs/contrastive-memory.svg
    python -m benchmarks.contrastive --keep 0 64 128 256     # budgets of kept graphs; draws docs/contrastive-keep.svg

The same encoder (a BERT of random weights, mean pooling), batch, chunk, AdamW, and thread per rank for all. In the race
each contestant has processes of its own, and turns alternate; the fastest of its turns counts. Peak memory is the
high-water mark of a step less what was resident before it. sentence-transformers is a peer only where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isograd as ig
from benchmarks import report
from benchmarks.sequence_memory import peak_of
from isograd.comm.launch import World

CHART = Path(__file__).parents[1] / "docs" / "contrastive-memory.svg"
KEPT = CHART.with_name("contrastive-keep.svg")
HIDDEN, VOCAB, SCALE = 384, 1000, 20.0
OURS, PEER, FULL = "isograd GradCache", "sentence-transformers", "full batch"
SWEEP = (256, 1024, 4096, 16384)


class Encoder(nn.Sequential):
    """A BERT that is called, and subscripted, as a SentenceTransformer is."""

    def __init__(self, layers: int) -> None:
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": layers,
        }
        super().__init__(BertModel(BertConfig(**sizes, num_attention_heads=6), add_pooling_layer=False))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self[0](input_ids=features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
        mask = features["attention_mask"][..., None].to(hidden.dtype)
        return {"sentence_embedding": (hidden * mask).sum(1) / mask.sum(1)}


def batch(rows: int, length: int) -> list[dict[str, Tensor]]:
    made = torch.randint(VOCAB, (2, rows, length))
    return [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} for tokens in made]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Contestant:
    def __init__(self, name: str, layers: int, chunk: int) -> None:
        import torch.distributed as dist

        self.name, world = name, dist.get_world_size() if dist.is_initialized() else 1
        plain = Encoder(layers)
        self.model: nn.Module = plain
        if name.startswith(OURS):
            keep_mb = float(name.removeprefix(OURS) or 0)  # "isograd GradCache 64"
            mesh = ig.Mesh(f"dp{world}")
            self.engine = ig.Engine(plain, mesh, adamw)
            loss = ig.contrastive.InfoNCE(mesh, SCALE)
            encode = lambda **features: plain(features)["sentence_embedding"]  # noqa: E731
            self.cache = ig.contrastive.GradCache(self.engine, loss, encode=encode, chunk=chunk, keep_mb=keep_mb)
            return
        if world > 1:
            self.model = DistributedDataParallel(plain)
        self.optimizer = adamw(self.model.parameters())
        if name == PEER:
            from sentence_transformers.losses import (  # type: ignore[import-not-found]
                CachedMultipleNegativesRankingLoss,
            )

            self.loss = CachedMultipleNegativesRankingLoss(
                plain, SCALE, mini_batch_size=chunk, gather_across_devices=world > 1
            )
            self.loss.model = self.model

    def step(self, features: list[dict[str, Tensor]]) -> None:
        if self.name.startswith(OURS):
            self.cache.backward(*features)
            self.engine.step()
            return
        if self.name == PEER:
            self.loss(features, None).backward()
        else:
            vectors = [F.normalize(self.model(part)["sentence_embedding"], dim=1) for part in features]
            F.cross_entropy(SCALE * vectors[0] @ vectors[1].T, torch.arange(len(vectors[0]))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


_held: dict[str, Contestant] = {}  # in each rank


def sit(name: str, layers: int, chunk: int, length: int) -> None:
    torch.set_num_threads(1)
    _held["me"] = Contestant(name, layers, chunk)
    for _ in range(2):
        _held["me"].step(batch(2 * chunk, length))


def turn(rows: int, length: int) -> tuple[float, int]:
    """Seconds and peak bytes of a step."""
    features = batch(rows, length)
    began = time.perf_counter()
    _held["me"].step(features)
    seconds = time.perf_counter() - began
    return seconds, peak_of(lambda: _held["me"].step(features))


def peak(rows: int, length: int) -> int:
    features = batch(rows, length)
    return peak_of(lambda: _held["me"].step(features))


def names(ranks: int) -> list[str]:
    peers = [PEER] if importlib.util.find_spec("sentence_transformers") else []
    return [OURS, *peers, *([FULL] if ranks == 1 else [])]


def race(ranks: int, options: argparse.Namespace, chosen: list[str] | None = None) -> dict[str, tuple[float, int]]:
    worlds = {name: World(ranks) for name in chosen or names(ranks)}
    best = dict.fromkeys(worlds, (float("inf"), 0))
    for name, world in worlds.items():
        world.run(sit, name, options.layers, options.chunk, options.length, timeout=900.0)
    for _ in range(options.rounds):
        for name, world in worlds.items():
            found = world.run(turn, options.rows // ranks, options.length, timeout=900.0)
            seconds, peak = (max(column) for column in zip(*found, strict=True))
            best[name] = min(best[name][0], seconds), max(best[name][1], int(peak))
    for world in worlds.values():
        world.close()
    return best


def sweep(options: argparse.Namespace) -> dict[str, dict[int, int]]:
    peaks: dict[str, dict[int, int]] = {}
    for name in [options.only] if options.only else names(1):
        peaks[name] = {}
        with World(1) as world:
            world.run(sit, name, options.layers, options.chunk, options.length, timeout=900.0)
            for rows in SWEEP:
                if rows <= {FULL: 1024, PEER: options.peer_rows}.get(name, rows):
                    peaks[name][rows] = world.run(peak, rows, options.length, timeout=900.0)[0]
                    print(f"  {name}, {rows} rows: {peaks[name][rows] / report.MIB:.1f} MiB", flush=True)
    return peaks


def slope(peaks: dict[int, int]) -> float:
    """Bytes per row, over the bytes of a row's representations."""
    few, many = min(peaks), max(peaks)
    return (peaks[many] - peaks[few]) / (many - few) / (2 * HIDDEN * 4)


def chart(peaks: dict[str, dict[int, int]], path: Path) -> None:
    ticks = {rows: f"{rows:,}" for rows in SWEEP}
    with report.growth(
        path,
        "Peak memory of a contrastive step in chunks",
        "rows of the batch",
        "MiB above what was resident before the step",
        ticks,
    ) as panel:
        for (name, found), marker in zip(peaks.items(), "osD", strict=False):
            panel.plot(list(found), [b / report.MIB for b in found.values()], marker=marker, label=name)
        first = next(iter(peaks.values()))
        ideal = [(first[min(first)] + (rows - min(first)) * 2 * HIDDEN * 4) / report.MIB for rows in SWEEP]
        panel.plot(SWEEP, ideal, linestyle=":", color="grey", label="the representations' own bytes")


def keeping(options: argparse.Namespace) -> None:
    """Time and peak memory of one process by the budget of kept graphs, beside the full batch in one graph."""
    budgets = [f"{OURS} {megabytes:g}" for megabytes in options.keep]
    found = race(1, options, [*budgets, FULL])
    table = Table("keep_mb", "seconds a step", "x the full batch", "peak MiB")
    for name, (seconds, peak) in found.items():
        shown = name.removeprefix(OURS).strip()
        table.add_row(shown, f"{seconds:.3f}", f"{seconds / found[FULL][0]:.2f}", f"{peak / report.MIB:.0f}")
    Console(width=100).print(table)
    points = [(peak / report.MIB, seconds / found[FULL][0]) for seconds, peak in found.values()]
    doublings = range(int(math.log2(min(points)[0])), int(math.log2(max(points)[0])) + 2)
    with report.growth(
        KEPT,
        f"A contrastive step of {options.rows:,} rows: time for memory",
        "peak MiB above what was resident before the step",
        "time, of the full batch's in one graph",
        {2**n: f"{2**n}" for n in doublings},
        from_zero=True,
    ) as panel:
        panel.plot(*zip(*points[:-1], strict=True), marker="o", label="GradCache; the numbers are keep_mb")
        for point, megabytes in zip(points, options.keep, strict=False):
            panel.annotate(f"{megabytes:g}", point, textcoords="offset points", xytext=(6, 6))
        panel.plot(*points[-1], marker="D", linestyle="", color="grey", label="full batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="of all ranks together")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="the sweep over rows instead of the race")
    parser.add_argument("--keep", type=float, nargs="+", help="budgets in MiB, raced beside the full batch")
    parser.add_argument("--only", help="in the sweep: one contestant")
    parser.add_argument("--peer-rows", type=int, default=SWEEP[-1], help="in the sweep: the peer's largest batch")
    parser.add_argument("--chart", default=str(CHART), help="where to draw the sweep; '' for nowhere")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    report.OUT.mkdir(exist_ok=True)
    if options.memory:
        peaks = sweep(options)
        for name, found in peaks.items():
            print(f"{name}: grows by {slope(found):.2f} x the bytes of the representations")
        document: dict[str, Any] = {"bytes": peaks, "machine": report.machine()}
        (report.OUT / "contrastive-memory.json").write_text(json.dumps(document, indent=1) + "\n")
        if options.chart:
            chart(peaks, Path(options.chart))
        return
    if options.keep:
        keeping(options)
        return
    table = Table("ranks", "contestant", "seconds a step", "x the peer", "peak MiB")
    results = {ranks: race(ranks, options) for ranks in (1, 2)}
    for ranks, found in results.items():
        reference = found.get(PEER, found[OURS])[0]
        for name, (seconds, peak) in found.items():
            table.add_row(str(ranks), name, f"{seconds:.3f}", f"{seconds / reference:.2f}", f"{peak / report.MIB:.0f}")
    Console(width=100).print(table)
    (report.OUT / "contrastive.json").write_text(
        json.dumps({"race": results, "machine": report.machine()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
