"""The verifier's null experiment: how far apart are right gradients, and how often does it see a wrong one?

    python -m benchmarks.verify_null             # ten to forty minutes on two cores; --quick: one to four
    python -m benchmarks.verify_null --seeds 8 --dtypes float32
    python -m benchmarks.verify_null --plant 0 --dtypes float32 --layers 12 --seeds 6     # 12,000 right tensors

Layouts that are right, judged as `isograd verify` judges: the three models of isograd.prove.builtin_cases with data
and weights drawn anew from every seed, biases and norms too, as after some training. Every tensor that is not called
PASS is a false alarm. Beside it the same with one kind of parameter whose gradient is `--plant` (1 %) too large under
the layout: every tensor of it that is not called BUG is a miss, and every other one that is called BUG is a false
alarm again.

In fp64 a tensor is judged by its largest relative error over ranks and blocks, limit 1e-9. In fp32 and bf16 it is
judged by its distance from the fp64 truth in units of the noise of re-associated one-device runs: PASS to 3, BUG from 8
(numerics.py). Two recordings have no such ensemble: `verify compare` judges them by relative errors alone, with the
limits of tolerances.py, so how many right tensors exceed those is counted, too. And there the one factor by which all
gradients together differ is judged by its own noise: it finds a scale that drowns in each tensor's rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from isograd.core import rng
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.launcher.launch import World
from isograd.models import Transformer, TransformerConfig
from isograd.prove import builtin_cases, prove
from isograd.prove.case import Case
from isograd_verify import tolerances
from isograd_verify.compare import numerics, tensorwise
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS, kind
from isograd_verify.tell.report import Report

OUT = Path(__file__).parent / "out"
MODELS = {"llama": builtin_cases.LLAMA, "gpt2": builtin_cases.GPT2, "qwen": builtin_cases.QWEN}
LAYOUTS = ("dp2 zero1", "tp2", "tp2 sp", "dp3 zero2", "dp2 tp2 sp zero1", "tp4 sp")
QUICK = ("dp2 zero1", "tp2 sp")
SEEDS = {"float64": 7, "float32": 5, "bfloat16": 5}
CLASSES = ("*norm*.weight", "*.attention.v.weight", "embed.weight", "*.mlp.down.weight", "*.attention.q.weight")
STEPS = {torch.float64: 2, torch.float32: 1, torch.bfloat16: 1}  # narrower ones are judged on their first step alone
ROWS, LENGTH = 9, builtin_cases.LENGTH
SPREAD = ("median", "99 %", "99.9 %", "largest")


# -- the cases ---------------------------------------------------------------------------------------------------


def case(config: TransformerConfig, seed: int, steps: int, planted: str, factor: float, mesh: Mesh) -> Case:
    """A small decoder with weights and data of its own; under a layout, `planted` tensors' gradients times `factor`."""
    made = Transformer(config, mesh, seed=seed)
    trained(made, mesh, seed)
    if planted and mesh.layout.world_size > 1:
        for name, parameter in made.named_parameters():
            if fnmatch(name, planted):
                parameter.register_hook(lambda gradient: gradient * factor)
    key = rng.key(seed, "null")
    return Case(made, batch(config, seed), partial(loss, key), steps=steps)


def loss(key: Any, model: nn.Module, part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = model(part["tokens"], part["labels"], key=key, samples=part["samples"])
    return result


def batch(config: TransformerConfig, seed: int) -> dict[str, Tensor]:
    """Rows with any number of labels, one of them with none."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    window = torch.randint(config.vocab, (ROWS, LENGTH + 1), generator=generator)
    labels = window[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : int(torch.randint(LENGTH, (), generator=generator))] = -100
    labels[seed % ROWS] = -100
    return {"tokens": window[:, :-1].clone(), "labels": labels, "samples": torch.arange(ROWS)}


def trained(model: Transformer, mesh: Mesh, seed: int) -> None:
    """Norms and biases away from one and zero, weights up to three times larger: the same under every layout."""
    table = contracts(model, mesh)
    for name, parameter in model.named_parameters():
        digest = hashlib.blake2b(f"{name}/{seed}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        scale = 1 + 2 * float(torch.rand((), generator=generator))
        whole = torch.randn(table[name].shape, generator=generator)
        here = whole[tuple(slice(*span) for span in table[name].local(mesh))]
        with torch.no_grad():
            parameter.mul_(scale).add_(here, alpha=0.1 if parameter.dim() == 1 else 0.0)


# -- the experiment ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What was seen of one precision, over models, seeds and layouts."""

    dtype: str
    subjects: Counter[str] = field(default_factory=Counter)  # layouts by verdict, nothing planted
    tensors: Counter[str] = field(default_factory=Counter)  # tensors by verdict, nothing planted
    errors: list[float] = field(default_factory=list)  # each tensor's largest relative error over ranks and blocks
    beyond: Counter[str] = field(default_factory=Counter)  # kinds of tensors above the second of the relative limits
    between: Counter[str] = field(default_factory=Counter)  # and between the first and the second
    ratios: list[float] = field(default_factory=list)  # and its error / noise, largest over ranks
    factors: list[float] = field(default_factory=list)  # error / noise of the one factor of all gradients, per layout
    planted: Counter[str] = field(default_factory=Counter)  # tensors of the planted class, by verdict
    named: Counter[str] = field(default_factory=Counter)  # layouts with a plant, by verdict
    right_name: int = 0  # of them those in which a finding names planted tensors only, and their factor
    other_name: int = 0  # and those in which some other bug is told
    innocent: Counter[str] = field(default_factory=Counter)  # the other tensors of those runs, by verdict
    planted_ratios: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # every sentence that should not have been said


class KeptWorld(World):
    """Ranks that outlive the proof of one case, for starting several takes longer than a case does."""

    kept: ClassVar[dict[int, World]] = {}

    def __new__(cls, nproc: int) -> Any:
        return cls.kept.setdefault(nproc, super().__new__(cls))

    def __init__(self, nproc: int) -> None:
        if not hasattr(self, "nproc"):
            super().__init__(nproc)

    def close(self, kill: bool = False) -> None:
        if kill:
            super().close(kill)


def proved(make: Any, layouts: tuple[str, ...], dtype: torch.dtype) -> tuple[Report, list[list[float]]]:
    """The report; and per layout the ratios of error to noise: one per tensor, in order, then the one factor's."""
    heard: list[float] = []

    def judged(ratio: float, limits: tuple[float, float] = tolerances.NOISE) -> str:
        heard.append(ratio)
        return numerics.verdict(ratio, limits)

    tensorwise.judged = judged  # type: ignore[attr-defined]
    report = prove.verify(make, layouts, dtype=dtype)
    by_layout = []
    for subject in report.subjects if heard else ():
        count = len(subject.errors) + 1
        by_layout.append(heard[:count])
        del heard[:count]
    assert not heard, "a tensor was judged that the report does not list"
    return report, by_layout


def right(outcome: Outcome, model: str, seed: int, layouts: tuple[str, ...], dtype: torch.dtype) -> None:
    report, ratios = proved(partial(case, MODELS[model], seed, STEPS[dtype], "", 1.0), layouts, dtype)
    outcome.ratios += [r for found in ratios for r in found[:-1]]
    outcome.factors += [found[-1] for found in ratios]
    for subject in report.subjects:
        outcome.subjects[subject.verdict] += 1
        outcome.errors += subject.errors.values()
        low, high = tolerances.LIMITS[outcome.dtype]
        outcome.beyond.update(kind(name) for name, error in subject.errors.items() if error > high)
        outcome.between.update(kind(name) for name, error in subject.errors.items() if low < error <= high)
        outcome.tensors.update(subject.verdict_of(name) for name in subject.errors)
        for finding in subject.findings:
            if finding.verdict in (BUG, INCONCLUSIVE):
                outcome.said.append(f"{model}, seed {seed}, {subject.name}: {finding.verdict}: {finding.sentence}")


def wrong(outcome: Outcome, model: str, seed: int, layouts: tuple[str, ...], dtype: torch.dtype, by: float) -> None:
    planted = CLASSES[seed % len(CLASSES)]
    report, ratios = proved(partial(case, MODELS[model], seed, 1, planted, 1 + by), layouts, dtype)
    for subject, found in zip(report.subjects, ratios, strict=False):
        named = zip(subject.errors, found, strict=False)
        outcome.planted_ratios += [ratio for name, ratio in named if fnmatch(name, planted)]
    for subject in report.subjects:
        outcome.named[subject.verdict] += 1
        bugs = [f for f in subject.findings if f.verdict == BUG]
        told = {f for f in bugs if all(fnmatch(t, planted) for t in f.tensors) and f"{1 + by:.4g} times" in f.sentence}
        outcome.right_name += bool(told)
        outcome.other_name += len(told) < len(bugs)
        where = f"{model}, seed {seed}, {subject.name}, {planted}"
        outcome.said += [f"{where}: {f.sentence}" for f in bugs if f not in told]
        for name in subject.errors:
            counted = outcome.planted if fnmatch(name, planted) else outcome.innocent
            counted[subject.verdict_of(name)] += 1
            if counted is outcome.innocent and subject.verdict_of(name) != PASS:
                outcome.said.append(f"{where}: {name} is not PASS")


def quantiles(values: list[float]) -> tuple[float, float, float, float]:
    """Median, 99 %, 99.9 %, largest."""
    if not values:
        return (float("nan"),) * 4
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    return (*(float(ordered.quantile(q, interpolation="higher")) for q in (0.5, 0.99, 0.999)), float(ordered[-1]))


# -- the tables --------------------------------------------------------------------------------------------------


def tables(outcomes: list[Outcome], plant: float) -> list[tuple[str, list[dict[str, str]]]]:
    """Each a title and rows; a row is its cells by column."""
    return [
        ("right layouts, as `isograd verify` judges them", [null_row(o) for o in outcomes]),
        (
            "right layouts, relative errors, as `verify compare` judges two recordings",
            [relative_row(o) for o in outcomes],
        ),
        (f"one kind of parameter {100 * plant:g} % too large", [planted_row(o) for o in outcomes if plant]),
    ]


def null_row(o: Outcome) -> dict[str, str]:
    whole = o.dtype == "float64"
    spread = quantiles(o.errors if whole else o.ratios)
    return {
        "dtype": o.dtype,
        "judged by": "error" if whole else "error / noise",
        "tensors": f"{o.tensors.total()}",
        "layouts": f"{o.subjects.total()}",
        "one factor of all, largest": f"{max(o.factors):.2f}" if o.factors else "-",
        **{name: f"{q:.1e}" if whole else f"{q:.2f}" for name, q in zip(SPREAD, spread, strict=True)},
        BUG: f"{o.tensors[BUG]}",
        INCONCLUSIVE: f"{o.tensors[INCONCLUSIVE]}",
        "layouts not PASS": f"{o.subjects.total() - o.subjects[PASS]}",
    }


def relative_row(o: Outcome) -> dict[str, str]:
    low, high = tolerances.LIMITS[o.dtype]
    return {
        "dtype": o.dtype,
        **{name: f"{q:.1e}" for name, q in zip(SPREAD, quantiles(o.errors), strict=True)},
        "PASS to": f"{low:g}",
        "BUG above": f"{high:g}",
        "tensors above the first": f"{sum(e > low for e in o.errors)}",
        "and the second": f"{sum(e > high for e in o.errors)}",
    }


def planted_row(o: Outcome) -> dict[str, str]:
    def share(count: int, of: Counter[str]) -> str:
        return f"{100 * count / max(of.total(), 1):.1f} %"

    return {
        "dtype": o.dtype,
        "planted tensors": f"{o.planted.total()}",
        **{verdict: share(o.planted[verdict], o.planted) for verdict in (BUG, INCONCLUSIVE, PASS)},
        "median error / noise": f"{quantiles(o.planted_ratios)[0]:.1f}" if o.planted_ratios else "-",
        "layouts": f"{o.named.total()}",
        "BUG in": share(o.named[BUG], o.named),
        "named rightly": share(o.right_name, o.named),
        "something else told": share(o.other_name, o.named),
        "other tensors": f"{o.innocent.total()}",
        "of them not PASS": f"{o.innocent.total() - o.innocent[PASS]}",
    }


def markdown(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---", *["---:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(outcomes: list[Outcome], plant: float, as_markdown: bool, console: Console) -> None:
    """The tables; which kinds exceed the relative limits; and the sentences that should not have been said."""
    for title, rows in tables(outcomes, plant):
        if not rows:
            continue
        if as_markdown:
            print(f"\n{title}\n\n{markdown(rows)}")
            continue
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
    for outcome in outcomes:
        for words, found in (("above the second relative limit", outcome.beyond), ("between them", outcome.between)):
            if found:
                counts = ", ".join(f"{name} {count}" for name, count in found.most_common())
                console.print(f"{outcome.dtype}, {words}: {counts}", markup=False)
        for sentence in outcome.said[:20]:
            console.print(f"{outcome.dtype}: {sentence}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two layouts")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"default {SEEDS}")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--layers", type=int, metavar="N", help="of each model, default 2: more tensors in a layout")
    parser.add_argument("--dtypes", nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--plant", type=float, default=0.01, metavar="P", help="default 0.01; 0 plants nothing")
    parser.add_argument("--markdown", action="store_true", help="tables for notes/2026-11-22-to-25.md")
    options = parser.parse_args()
    began, console = time.monotonic(), Console(width=150)
    prove.World = KeptWorld
    if options.layers:
        MODELS.update((name, replace(config, layers=options.layers)) for name, config in MODELS.items())
    layouts = QUICK if options.quick else LAYOUTS
    outcomes = []
    for dtype in options.dtypes:
        outcome = Outcome(dtype)
        outcomes.append(outcome)
        count = options.seeds or (1 if options.quick else SEEDS[dtype])
        for seed in range(options.first_seed, options.first_seed + count):
            for model in MODELS:
                right(outcome, model, seed, layouts, getattr(torch, dtype))
                if options.plant and seed % 2 == options.first_seed % 2:
                    wrong(outcome, model, seed, layouts, getattr(torch, dtype), options.plant)
            console.print(f"{dtype}, seed {seed}: {time.monotonic() - began:.0f} s", style="dim")
    show(outcomes, options.plant, options.markdown, console)
    for world in KeptWorld.kept.values():
        World.close(world)
    OUT.mkdir(exist_ok=True)
    (OUT / "verify_null.json").write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
