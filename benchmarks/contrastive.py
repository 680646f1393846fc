"""Contrastive steps beside sentence-transformers' cached loss and the plain full batch: time, peak memory, its growth.

    python -m benchmarks.contrastive                         # one process and 2 gloo ranks, under four minutes
    python -m benchmarks.contrastive --memory                # 256 to 16,384 rows; draws docs/contrastive-memory.svg
    python -m benchmarks.contrastive --keep 0 64 128 256     # budgets of kept graphs; draws docs/contrastive-keep.svg

The same encoder (a BERT of random weights, mean pooling), batch, chunk, AdamW, and thread per rank for all. In the race
each contestant has processes of its own, and turns of one step alternate; a ratio is the median over rounds of the
ratios in a round. CPU time is that of all threads of all ranks. Peak memory is the high-water mark of a step less what
was resident before it. sentence-transformers is a peer only where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isograd as ig
from benchmarks import quiet, report
from benchmarks.sequence_memory import peak_of
from isograd.launcher.launch import World

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
            self.cache = ig.contrastive.GradientCache(self.engine, loss, encode=encode, chunk=chunk, keep_mb=keep_mb)
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


def turn(rows: int, length: int) -> tuple[float, float, int]:
    """Seconds, seconds of this rank's CPU, and peak bytes of a step."""
    features, clocks = batch(rows, length), []

    def step() -> None:
        clocks.append((time.perf_counter(), time.process_time()))
        _held["me"].step(features)
        clocks.append((time.perf_counter(), time.process_time()))

    peak = peak_of(step)
    seconds, cpu = (after - before for before, after in zip(*clocks, strict=True))
    return seconds, cpu, peak


def peak(rows: int, length: int) -> int:
    features = batch(rows, length)
    return peak_of(lambda: _held["me"].step(features))


@dataclass
class Raced:
    """What was measured of a contestant, by round."""

    seconds: list[float] = field(default_factory=list)  # of the slowest rank
    cpu: list[float] = field(default_factory=list)  # of all ranks together
    peak: int = 0  # of the largest rank

    def ratios(self, other: Raced, of: str) -> list[float]:
        return [mine / theirs for mine, theirs in zip(getattr(self, of), getattr(other, of), strict=True)]

    def ratio(self, other: Raced, of: str) -> float:
        return statistics.median(self.ratios(other, of))


def names(ranks: int) -> list[str]:
    peers = [PEER] if importlib.util.find_spec("sentence_transformers") else []
    return [OURS, *peers, *([FULL] if ranks == 1 else [])]


def race(ranks: int, options: argparse.Namespace, chosen: list[str]) -> dict[str, Raced]:
    worlds = {name: World(ranks) for name in chosen}
    found = {name: Raced() for name in chosen}
    for name, world in worlds.items():
        world.run(sit, name, options.layers, options.chunk, options.length, timeout=900.0)
    for number in range(options.rounds):
        for name in chosen[:: -1 if number % 2 else 1]:
            each = worlds[name].run(turn, options.rows // ranks, options.length, timeout=900.0)
            seconds, cpu, peaks = zip(*each, strict=True)
            found[name].seconds.append(max(seconds))
            found[name].cpu.append(sum(cpu))
            found[name].peak = max(found[name].peak, *peaks)
    for world in worlds.values():
        world.close()
    return found


def row(ranks: int, ours: Raced, peer: Raced) -> dict[str, Any]:
    """What benchmarks.all draws, and benchmarks.diff compares: the peer is what time is measured by, on any day."""
    rounds = ours.ratios(peer, "seconds")
    return {
        "name": f"isograd, {ranks} rank{'s' * (ranks > 1)}",
        "peer": PEER,
        "of_peer_rounds": rounds,
        "of_one_rounds": rounds,
        "cpu_of_peer": ours.ratio(peer, "cpu"),
        "peak_of_peer": ours.peak / peer.peak,
        "wire_bytes": None,
        "bound_bytes": None,
    }


def sweep(options: argparse.Namespace) -> dict[str, dict[int, int]]:
    peaks: dict[str, dict[int, int]] = {}
    for name in [options.only] if options.only else names(1):
        peaks[name] = {}
        with World(1) as world:
            world.run(sit, name, options.layers, options.chunk, options.length, timeout=900.0)
            for rows in options.sweep:
                if rows <= {FULL: 1024, PEER: options.peer_rows}.get(name, rows):
                    peaks[name][rows] = world.run(peak, rows, options.length, timeout=900.0)[0]
                    print(f"  {name}, {rows} rows: {peaks[name][rows] / report.MIB:.1f} MiB", flush=True)
    return peaks


def joined(paths: Sequence[Path]) -> dict[str, dict[int, int]]:
    """One sweep of several that took a part each."""
    peaks: dict[str, dict[int, int]] = {}
    for path in paths:
        for name, found in json.loads(path.read_text())["bytes"].items():
            peaks.setdefault(name, {}).update({int(rows): size for rows, size in found.items()})
    return {name: dict(sorted(found.items())) for name, found in peaks.items()}


def slope(peaks: dict[int, int]) -> float:
    """Bytes per row, over the bytes of a row's representations; from 1,024 rows on, a whole tile of logits."""
    many = max(peaks)
    few = min(rows for rows in peaks if rows >= 1024 or many <= 1024)
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


def written(options: argparse.Namespace, stem: str, found: dict[str, Any]) -> None:
    document = {**found, "options": vars(options), "machine": report.machine()}
    report.OUT.mkdir(exist_ok=True)
    for path in [report.OUT / f"{stem}.json", *([options.json] if options.json else [])]:
        path.write_text(json.dumps(document, indent=1, default=str) + "\n")


def keeping(options: argparse.Namespace) -> None:
    """Time and peak memory of one process by the budget of kept graphs, beside the full batch in one graph."""
    budgets = [f"{OURS} {megabytes:g}" for megabytes in options.keep]
    found = race(1, options, [*budgets, FULL])
    table = Table("keep_mb", "seconds a step", "x the full batch", "its CPU time", "peak MiB")
    for name, raced in found.items():
        shown, ratios = name.removeprefix(OURS).strip(), [raced.ratio(found[FULL], of) for of in ("seconds", "cpu")]
        seconds = f"{statistics.median(raced.seconds):.3f}"
        table.add_row(shown, seconds, *(f"{ratio:.2f}" for ratio in ratios), f"{raced.peak / report.MIB:.0f}")
    Console(width=100).print(table)
    written(options, "contrastive-keep", {"kept": {name: asdict(raced) for name, raced in found.items()}})
    points = [(raced.peak / report.MIB, raced.ratio(found[FULL], "cpu")) for raced in found.values()]
    doublings = range(int(math.log2(min(points)[0])), int(math.log2(max(points)[0])) + 2)
    with report.growth(
        KEPT,
        f"A contrastive step of {options.rows:,} rows: time for memory",
        "peak MiB above what was resident before the step",
        "CPU time, of the full batch's in one graph",
        {2**n: f"{2**n}" for n in doublings},
        from_zero=True,
    ) as panel:
        panel.plot(*zip(*points[:-1], strict=True), marker="o", label="GradCache; the numbers are keep_mb")
        for point, megabytes in zip(points, options.keep, strict=False):
            panel.annotate(f"{megabytes:g}", point, textcoords="offset points", xytext=(6, 6))
        panel.plot(*points[-1], marker="D", linestyle="", color="grey", label="full batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="of all ranks together")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="a race for each")
    parser.add_argument("--budget", type=float, default=0.0, help="a further contestant: isograd with this keep_mb")
    parser.add_argument("--anyway", action="store_true", help="race on a machine that other jobs use, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here, too")
    parser.add_argument("--memory", action="store_true", help="the sweep over rows instead of the race")
    parser.add_argument("--keep", type=float, nargs="+", help="budgets in MiB, raced beside the full batch")
    parser.add_argument("--sweep", type=int, nargs="+", default=list(SWEEP), help="in the sweep: numbers of rows")
    parser.add_argument("--drawn", type=Path, nargs="+", help="draw the sweep that these files of --json are parts of")
    parser.add_argument("--only", help="in the sweep: one contestant")
    parser.add_argument("--peer-rows", type=int, default=SWEEP[-1], help="in the sweep: the peer's largest batch")
    parser.add_argument("--chart", default=str(CHART), help="where to draw the sweep; '' for nowhere")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    if not (options.memory or options.anyway):
        quiet.refuse_noise()
    if options.memory:
        peaks = joined(options.drawn) if options.drawn else sweep(options)
        for name, found in peaks.items():
            if len(found) > 1:
                print(f"{name}: grows by {slope(found):.2f} x the bytes of the representations")
        written(options, "contrastive-memory", {"bytes": peaks})
        if options.chart:
            chart(peaks, Path(options.chart))
        return
    if options.keep:
        keeping(options)
        return
    table = Table("ranks", "contestant", "seconds a step", "x the peer", "its CPU time", "peak MiB", "x the peer's")
    results = {}
    for ranks in options.ranks:
        budget = [f"{OURS} {options.budget:g}"] if options.budget else []
        results[ranks] = found = race(ranks, options, [*names(ranks), *budget])
        reference = found.get(PEER, found[OURS])
        for name, raced in found.items():
            ratios = [f"{raced.ratio(reference, of):.3f}" for of in ("seconds", "cpu")]
            peaks = f"{raced.peak / report.MIB:.0f}", f"{raced.peak / reference.peak:.2f}"
            table.add_row(str(ranks), name, f"{statistics.median(raced.seconds):.3f}", *ratios, *peaks)
    Console(width=110).print(table)
    shown = {ranks: {name: asdict(raced) for name, raced in found.items()} for ranks, found in results.items()}
    rows = [row(ranks, found[OURS], found[PEER]) for ranks, found in results.items() if PEER in found]
    written(options, "contrastive", {"race": shown, "rows": rows})


if __name__ == "__main__":
    main()
