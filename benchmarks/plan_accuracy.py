"""Predicted steps beside published ones: fits the rates of machines on one half of the publishers, judges on the other.

    python -m benchmarks.plan_accuracy ground_truth.csv             # the tables of docs/plan.md
    python -m benchmarks.plan_accuracy ground_truth.csv --worst 9   # and the rows that are furthest off

Rows whose numbers were written down from memory (conf=recalled), without a layout, or of models that this decoder is
not (latent attention), do not count. A publisher's rows are all in one half: rates never see rows of those they are
judged on. The width of the intervals is found inside the half, too: each publisher there is predicted with rates of the
others there. machines/*.yaml have the rates of the second half.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import re
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from isograd.errors import IsogradError
from isograd.layout import Layout
from isograd.models import TransformerConfig
from isograd.nn.routing import ExpertOptions
from isograd.plan import machine
from isograd.plan.machine import Machine
from isograd.plan.memory import memory
from isograd.plan.step_time import predict
from isograd.plan.work import Habits, Work

# What is known about the programs that were measured. Nothing here is fitted.
MEGATRON_2022 = Habits(
    fused_attention=False, passes=1.2, gradient_bytes=2, hides_gradients=0.0, even_layers=True, chunks_logits=False
)
MEGATRON = Habits(
    passes=1.0, hides_parameters=0.8, hides_tp=0.6, even_layers=True, saved=0.75, chunks_logits=False, gradient_bytes=4
)
FSDP = Habits(passes=2.0, gradient_bytes=2, keeps_gradients=False, chunks_logits=False)
TITAN = dataclasses.replace(FSDP, selective=0.5)  # its op-level recompute keeps every second product
COMPILED = dataclasses.replace(TITAN, passes=1.0, saved=0.7)
PUBLISHERS = {  # in the order of their first rows; a word of their source
    "MT-NLG": ("MT-NLG", MEGATRON_2022), "MosaicML": ("MosaicML", FSDP), "torchtitan": ("torchtitan", COMPILED),
    "NVIDIA": ("NVIDIA", MEGATRON), "bigscience": ("bigscience", MEGATRON_2022), "vTrain": ("vTrain", MEGATRON_2022),
    "Nemotron": ("Nemotron", MEGATRON),
}  # fmt: skip
EXPERTS = {  # (number, per token, width, shared width, dense layers first)
    "Mixtral-8x7B": (8, 2, 14336, 0, 0), "Mixtral-8x22B": (8, 2, 16384, 0, 0), "Qwen3-30B-A3B": (128, 8, 768, 0, 0),
    "Qwen3-235B-A22B": (128, 8, 1536, 0, 0), "GPT-OSS-120B": (128, 4, 2880, 0, 0),
}  # fmt: skip
NODES = {"V100-32GB": "v100", "V100-16GB": "v100", "A100-40GB": "a100", "A100-80GB": "a100", "H100-80GB": "h100",
         "H100-96GB": "h100", "B200-180GB": "b200"}  # fmt: skip
MEMORY = {"V100-16GB": 16.9, "V100-32GB": 34.1, "A100-40GB": 42.4, "H100-96GB": 102.0}


@dataclass(frozen=True)
class Row:
    """A published run, as a Work and a Layout."""

    publisher: str
    source: str
    label: str
    device: str
    kind: str  # key of the rates: machine and dtype of products
    machine: Machine
    work: Work
    layout: Layout
    seconds: float | None
    memory_gb: float | None
    out_of_memory: bool


def read(path: str) -> tuple[list[Row], dict[str, int]]:
    """The rows that count, and why others do not."""
    found, why = [], dict[str, int]()
    with open(path, encoding="utf-8") as file:
        for values in csv.DictReader(file):
            reason, row = _row(values)
            if row is None:
                why[reason] = why.get(reason, 0) + 1
            else:
                found.append(row)
    return found, why


def _row(v: dict[str, str]) -> tuple[str, Row | None]:
    source, _, notes = v["source"].partition("|")
    if "conf=recalled" in notes or ("others recalled" in notes and v["gpus"] != "6144"):
        return "numbers from memory", None
    if not v["tp"] or not v["pp"]:
        return "no layout", None
    if v["model"].startswith(("DeepSeek", "Kimi", "Nemotron-H", "Nemotron3")):
        return "latent attention or layers that this decoder lacks", None
    publisher = next(name for name, (word, _) in PUBLISHERS.items() if word in source)
    habits = _habits(publisher, notes)
    heads = int(v["heads"])
    dp, cp, tp, pp, ep = (int(v[n] or 1) for n in ("dp", "cp", "tp", "pp", "ep"))
    micro = int(v["micro_batch"] or 1)
    rows = int(v["global_batch"]) / dp
    layers, vpp = int(v["layers"]), int(v["vpp"] or 1)
    gated = v["model"].startswith(("Llama", "Mixtral", "Qwen", "GPT-OSS", "Grok"))
    experts = None
    if ep > 1 or v["model"] in EXPERTS:
        if v["model"] not in EXPERTS:
            return "experts that the table does not describe", None
        number, k, width, shared, first = EXPERTS[v["model"]]
        experts = ExpertOptions(number=number, per_token=k, width=width, shared=shared, dense_first=first)
    config = TransformerConfig(
        vocab=int(v["vocab"] or 50257), hidden=int(v["hidden"]), layers=layers, heads=heads,
        kv_heads=int(v["kv_heads"] or heads), mlp=int(v["ffn"]), gated=gated, head_dim=_head_dim(v),
        norm="rms" if gated else "layer", experts=experts,
    )  # fmt: skip
    precision = v["precision"].partition("-")[0]
    low = "fp8" if "fp8" in precision else None
    recompute = v["recompute"] or ("selective" if publisher == "NVIDIA" else "none")
    try:
        while layers < pp * vpp and vpp > 1:
            vpp -= 1
        layout = Layout(
            dp=dp, cp=cp, tp=tp, pp=pp, vpp=vpp if pp > 1 else 1, ep=ep, sp=v["sp"] == "1" and tp > 1,
            zero=int(v["zero"] or 1), cp_method="ring" if cp > 1 else "ulysses",
        )  # fmt: skip
    except IsogradError:
        return "a layout that isograd does not have", None
    work = Work(
        model=config, length=int(v["seq"]), batch=int(v["global_batch"]), micro_batches=max(1, round(rows / micro)),
        dtype="bf16" if precision in ("bf16", "fp8", "mxfp8") else "fp16", products=low, recompute=recompute,
        habits=habits,
    )  # fmt: skip
    name = NODES.get(v["gpu_type"])
    if name is None:
        return "a device that machines/ lacks", None
    device = _device(name, v["gpu_type"], source)
    label = f"{v['model']} {v['gpus']} x {v['gpu_type']} {layout}"
    return "", Row(
        publisher, source.strip(), label, v["gpu_type"], f"{name} {low or '16 bits'}", device, work, layout,
        _seconds(v, notes, work), float(v["memory_gb"]) if v["memory_gb"] else None, "OOM" in notes,
    )  # fmt: skip


def _habits(publisher: str, notes: str) -> Habits:
    habits = PUBLISHERS[publisher][1]
    if "accumulates grads in fp32" in notes:
        return dataclasses.replace(habits, kept_bytes=6)
    if publisher == "torchtitan" and "async" in notes:
        return dataclasses.replace(habits, hides_tp=0.6)
    return TITAN if publisher == "torchtitan" and "compile" not in notes else habits


def _device(name: str, kind: str, source: str) -> Machine:
    device = machine.load(name) if name != "v100" else V100
    device = dataclasses.replace(device, memory_gb=MEMORY.get(kind, device.memory_gb))
    if kind == "H100-96GB":  # HBM2e and less power: its owner puts the peak between SXM (989) and NVL (835)
        device = dataclasses.replace(device, memory_gb_s=2400, tflops={"bf16": 912, "fp16": 912, "fp8": 1824})
    if "vTrain" in source or "BLOOM" in source:  # 800 Gb/s, or 4 x 100 Gb/s, for a node of 8
        share = 12.5 if "vTrain" in source else 6.25
        device = dataclasses.replace(device, between=machine.Link(gb_s=share, latency_us=8))
    return device


def _head_dim(v: dict[str, str]) -> int | None:
    return {"Qwen3": 128, "GPT-OSS": 64}.get(next((n for n in ("Qwen3", "GPT-OSS") if v["model"].startswith(n)), ""))


def _seconds(v: dict[str, str], notes: str, work: Work) -> float | None:
    if found := re.search(r"iter_s=([\d.]+)", notes):
        return float(found[1])
    if found := re.search(r"tok_s_gpu=([\d.]+)", notes):
        return work.batch * work.length / (float(found[1]) * int(v["gpus"]))
    return None


V100 = machine.from_dict(
    {
        "name": "v100", "about": "NVIDIA V100, 4 in a node", "memory_gb": 34.1, "reserved_gb": 2, "memory_gb_s": 900,
        "tflops": {"fp16": 125, "fp32": 15.7}, "devices": 4, "inside": {"gb_s": 75, "latency_us": 4},
        "between": {"gb_s": 3.1, "latency_us": 10},
        "rates": {"matmul": {"fp16": 0.7, "fp32": 0.8}, "attention": 0.4, "memory": 0.8, "links": 0.75,
                  "operator_us": 10, "spread": 0.25},
    },
    "v100",
)  # fmt: skip


# -- the fit


Rates = dict[str, float]  # "h100 bf16": the share of the peak of large products; "links"
FIXED = {"links": 0.75, "attention": 0.45}
START = {"a100": 0.75, "h100": 0.65, "b200": 0.6, "v100": 0.6, "fp8": 0.5}


def with_rates(row: Row, rates: Rates) -> Machine:
    """The row's machine with fitted rates; a kind that no row of the half has keeps what stood before."""
    name, _, dtype = row.kind.partition(" ")
    start = START["fp8"] if dtype == "fp8" else START[name]
    old = row.machine.rates
    names = [dtype] if dtype == "fp8" else ["bf16", "fp16"]
    matmul = {**old.matmul, **dict.fromkeys(names, rates.get(row.kind, start))}
    attention = rates.get("attention", FIXED["attention"]) * (0.7 if name == "h100" else 1)
    fitted = dataclasses.replace(old, matmul=matmul, attention=attention, links=rates.get("links", FIXED["links"]))
    return dataclasses.replace(row.machine, rates=fitted)


def error(row: Row, rates: Rates) -> float:
    """log(predicted / published)."""
    assert row.seconds is not None
    return math.log(predict(row.work, row.layout, with_rates(row, rates), simulated=False).seconds / row.seconds)


def fit(rows: list[Row], rounds: int = 2) -> Rates:
    """One rate after the other, in some rounds: that with the smallest mean error, each publisher counted alike."""
    timed = [row for row in rows if row.seconds]
    weights = {name: 1 / sum(row.publisher == name for row in timed) for name in {row.publisher for row in timed}}
    rates = dict(FIXED)
    kinds = sorted({row.kind for row in timed})

    def loss(trial: Rates, chosen: list[Row]) -> float:
        return sum(weights[row.publisher] * abs(error(row, trial)) for row in chosen)

    for _ in range(rounds):
        for kind in [*kinds, *FIXED]:
            chosen = [row for row in timed if kind == row.kind or kind in FIXED]
            grid = [0.3, 0.45, 0.6, 0.75, 0.9] if kind in FIXED else [0.4 + 0.05 * i for i in range(11)]
            rates[kind] = min(grid, key=lambda value: loss({**rates, kind: value}, chosen))
    return rates


def spread_of(rows: list[Row]) -> float:
    """What 90 of 100 errors stay within, where each publisher is predicted with rates of the others."""
    errors = []
    for name in {row.publisher for row in rows}:
        rates = fit([row for row in rows if row.publisher != name], rounds=1)
        errors += [abs(error(row, rates)) for row in rows if row.publisher == name and row.seconds]
    return quantiles(errors, n=10)[8]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv")
    parser.add_argument("--worst", type=int, default=0, help="also list so many rows with the largest errors")
    options = parser.parse_args()
    rows, why = read(options.csv)
    print(f"{len(rows)} rows count; not counted: " + ", ".join(f"{n} ({reason})" for reason, n in why.items()))
    order = list(PUBLISHERS)
    halves = [{name for i, name in enumerate(order) if i % 2 == half} for half in (0, 1)]
    judged: list[tuple[Row, float, float]] = []  # (row, error, spread of the half it was not in)
    for half in halves:
        mine = [row for row in rows if row.publisher in half]
        rates, spread = fit(mine), spread_of(mine)
        print(f"fitted on {', '.join(sorted(half))}: {_said(rates)}; spread {spread:.2f}")
        judged += [(row, error(row, rates), spread) for row in rows if row.publisher not in half and row.seconds]
    table(judged)
    outcomes(rows)
    for row, wrong, _ in sorted(judged, key=lambda found: -abs(found[1]))[: options.worst]:
        print(f"  {wrong:+.2f}  {row.label}  [{row.publisher}]  {row.seconds:.2f} s")


def _said(rates: Rates) -> str:
    return ", ".join(f"{kind} {value:.2f}" for kind, value in rates.items())


def table(judged: list[tuple[Row, float, float]]) -> None:
    """By publisher and device."""
    print("\n| publisher | devices | runs | mean error | median error | bias | intervals that hold |")
    print("|---|---|---|---|---|---|---|")
    keys = dict.fromkeys((row.publisher, row.kind) for row, _, _ in judged)
    for publisher, kind in [*keys, ("all", "")]:
        here = [
            found for found in judged if publisher == "all" or (found[0].publisher, found[0].kind) == (publisher, kind)
        ]
        off = [abs(math.expm1(wrong)) for _, wrong, _ in here]
        bias = math.expm1(mean(wrong for _, wrong, _ in here))
        holds = mean(abs(wrong) <= spread for _, wrong, spread in here)
        print(
            f"| {publisher} | {kind} | {len(here)} | {mean(off):.1%} | {median(off):.1%} | {bias:+.1%} | {holds:.0%} |"
        )


def outcomes(rows: list[Row]) -> None:
    """Published memory, and runs that ended for want of it."""
    known = [row for row in rows if row.memory_gb]
    print("\n| publisher | runs | memory, mean error | bias |\n|---|---|---|---|")
    for publisher in dict.fromkeys(row.publisher for row in known):
        ratios = [bytes_of(row) / 1e9 / row.memory_gb for row in known if row.publisher == publisher and row.memory_gb]
        off = mean(abs(ratio - 1) for ratio in ratios)
        print(f"| {publisher} | {len(ratios)} | {off:.1%} | {mean(ratios) - 1:+.1%} |")
    gone = [row for row in rows if row.out_of_memory]
    seen = [bytes_of(row) > row.machine.memory_gb * 1e9 for row in gone]
    fine = [row for row in rows if not row.out_of_memory]
    wrong = sum(bytes_of(row) > row.machine.memory_gb * 1e9 for row in fine)
    print(
        f"\nout of memory: {sum(seen)} of {len(gone)} predicted; of {len(fine)} that ran, {wrong} are said not to fit"
    )
    for row in gone:
        print(f"  {row.label}: {bytes_of(row) / 1e9:.1f} of {row.machine.memory_gb:.1f} GB")


def bytes_of(row: Row) -> float:
    """What a rank needs, with what its driver and libraries take."""
    found: Any = memory(row.work, row.layout)
    return float(found.total + row.machine.reserved_gb * 1e9)


if __name__ == "__main__":
    main()
