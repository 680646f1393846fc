"""Predicted steps beside published ones: each publisher is judged with rates that its own rows had no part in.

    python -m benchmarks.plan_accuracy ground_truth.csv             # the tables of docs/plan-accuracy.md
    python -m benchmarks.plan_accuracy ground_truth.csv --worst 9   # and the rows that are furthest off
    python -m benchmarks.plan_accuracy ground_truth.csv --write     # writes the tables into docs/plan-accuracy.md

Rows whose numbers were written down from memory (conf=recalled), without a layout, or of models that this decoder is
not (latent attention), do not count. One number is fitted: which share of the best product's rate programs get, on all
devices. For each publisher it is fitted on the others; so is the width of its intervals. machines/*.yaml have the share
of all publishers.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import re
from dataclasses import dataclass
from itertools import accumulate, combinations
from statistics import mean, median
from typing import Any

from benchmarks import tables
from isograd.core.layout import Layout
from isograd.errors import IsogradError
from isograd.models import TransformerConfig
from isograd.nn.routing import ExpertOptions
from isograd.plan import machine
from isograd.plan.machine import Machine
from isograd.plan.memory import TIGHT, memory
from isograd.plan.step_time import predict
from isograd.plan.work import FrameworkProfile, Work

# What is known about the programs that were measured. Nothing here is fitted, but who wrote it had seen the rows.
MEGATRON_2022 = FrameworkProfile(
    fused_attention=False,
    passes=1.2,
    waits_for_sends=True,
    gradient_bytes=2,
    hides_gradients=0.0,
    even_layers=True,
    chunks_logits=False,
    fp32_rows=True,  # DeepSpeed's step makes them of what was reduced in 16 bits
)
MEGATRON = FrameworkProfile(
    passes=1.0,
    hides_parameters=0.8,
    hides_tp=0.6,
    even_layers=True,
    saved=0.75,
    chunks_logits=False,
    gradient_bytes=4,
    fused_sums=True,
    attention=1.5,  # cuDNN's kernels, in place of FlashAttention-2's
)
MOSAIC = FrameworkProfile(
    attention=0.53,  # FlashAttention's first version: 25 to 40 % of an A100, the second 50 to 73 %
    passes=2.0,
    gradient_bytes=2,
    keeps_gradients=False,
    chunks_logits=False,
    whole_in_pipeline=True,  # torchtitan's parameters are not given back between the micro-batches of a pipeline
)
TITAN = dataclasses.replace(
    MOSAIC,
    attention=1.0,
    selective=0.5,  # its op-level recompute keeps every second product
    gradient_bytes=4,  # its default
)
COMPILED = dataclasses.replace(TITAN, passes=1.0, saved=0.7)
PUBLISHERS = {  # in the order of their first rows; a word of their source
    "MT-NLG": ("MT-NLG", MEGATRON_2022), "MosaicML": ("MosaicML", MOSAIC), "torchtitan": ("torchtitan", COMPILED),
    "NVIDIA": ("NVIDIA", MEGATRON), "bigscience": ("bigscience", MEGATRON_2022), "vTrain": ("vTrain", MEGATRON_2022),
    "Nemotron": ("Nemotron", MEGATRON),
}  # fmt: skip
EXPERTS = {  # (number, per token, width, shared width, dense layers first)
    "Mixtral-8x7B": (8, 2, 14336, 0, 0), "Mixtral-8x22B": (8, 2, 16384, 0, 0), "Qwen3-30B-A3B": (128, 8, 768, 0, 0),
    "Qwen3-235B-A22B": (128, 8, 1536, 0, 0), "GPT-OSS-120B": (128, 4, 2880, 0, 0),
}  # fmt: skip
WINDOWS = {"GPT-OSS": 128}  # tokens that each sees, in every second layer
NODES = {"V100-32GB": "v100", "V100-16GB": "v100", "A100-40GB": "a100", "A100-80GB": "a100", "H100-80GB": "h100",
         "H100-96GB": "h100", "B200-180GB": "b200"}  # fmt: skip
YES, MAYBE, NO = "fits", "tight", "does not fit"
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
    profile = _habits(publisher, notes)
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
        vocab=-(-int(v["vocab"] or 50257) // (128 * tp)) * 128 * tp,  # all of these programs pad it
        hidden=int(v["hidden"]), layers=layers, heads=heads,
        kv_heads=int(v["kv_heads"] or heads), mlp=int(v["ffn"]), gated=gated, head_dim=_head_dim(v),
        norm="rms" if gated else "layer", experts=experts, **_windows(v["model"], layers),
    )  # fmt: skip
    precision = v["precision"].partition("-")[0]
    low = "fp8" if "fp8" in precision else None
    recompute = v["recompute"] or "none"
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
        profile=profile,
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


def _habits(publisher: str, notes: str) -> FrameworkProfile:
    profile = PUBLISHERS[publisher][1]
    if "Rebalancing layers" in notes:
        profile = dataclasses.replace(profile, ends_as_layers=True)
    if "accumulates grads in fp32" in notes:
        return dataclasses.replace(profile, kept_bytes=6, fp32_rows=False, widened=True)
    if publisher == "torchtitan" and "async" in notes:
        return dataclasses.replace(profile, hides_tp=0.6)
    return TITAN if publisher == "torchtitan" and "compile" not in notes else profile


def _device(name: str, kind: str, source: str) -> Machine:
    device = machine.load(name) if name != "v100" else V100
    device = dataclasses.replace(device, memory_gb=MEMORY.get(kind, device.memory_gb))
    if kind == "A100-40GB":
        device = dataclasses.replace(device, memory_gb_s=1555)
    if kind == "H100-96GB":  # HBM2e and less power: its owner puts the peak between SXM (989) and NVL (835)
        device = dataclasses.replace(device, memory_gb_s=2400, tflops={"bf16": 912, "fp16": 912, "fp8": 1824})
    if "vTrain" in source or "BLOOM" in source:  # 800 Gb/s, or 4 x 100 Gb/s, for a node of 8
        share = 12.5 if "vTrain" in source else 6.25
        device = dataclasses.replace(device, between=machine.Link(gb_s=share, latency_us=8))
    return device


def _windows(model: str, layers: int) -> dict[str, Any]:
    window = next((n for name, n in WINDOWS.items() if model.startswith(name)), None)
    return {"sliding_window": window, "full_layers": tuple(range(1, layers, 2))} if window else {}


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


# What kernels reach, published by people who measured kernels alone: none of it is in the ground truth.
# Products: the best shape's share of the peak, from the table of maximum achievable matmul FLOPS in S. Bekman's
# "Machine learning engineering" (2025); V100: about 110 of 125 TFLOPS.
PRODUCTS = {
    "a100": 0.869, "h100": 0.803, "b200": 0.776, "v100": 0.88, "h100 fp8": 0.709, "b200 fp8": 0.763,
}  # fmt: skip
# Fused causal attention, forward and backward, of long sequences: FlashAttention-2's paper (A100: 50 to 73 % forward)
# and FlashAttention-3's (H100: 370 of 989 forward by the second version, 600 by cuDNN). B200: a guess.
ATTENTION = {"a100": 0.56, "h100": 0.335, "b200": 0.3, "v100": 0.4}
UNITS = {"a100": 108, "h100": 132, "b200": 148, "v100": 80}  # multiprocessors
COMMON = {
    "links": 0.8,  # NCCL's bus bandwidth in a node: 235 of 300 GB/s on A100, 360 of 450 on H100
    "launch_us": 15.0,  # PyTorch's eager operators, with the Python of their modules
    "contention": 0.15,  # DeepSeek-V3 gives 20 of 132 multiprocessors to communication
    "jitter": 0.01, "operator_us": 3.0,
}  # fmt: skip


def with_rates(row: Row, sustained: float) -> Machine:
    """The row's machine, on which programs get a share of what the best product of a kernel benchmark gets."""
    name = row.kind.partition(" ")[0]
    old = row.machine.rates
    matmul = dict.fromkeys(("bf16", "fp16"), PRODUCTS[name] * sustained)
    matmul["fp8"] = PRODUCTS.get(f"{name} fp8", 0.0) * sustained
    rates = dataclasses.replace(old, matmul={**old.matmul, **matmul}, attention=ATTENTION[name], **COMMON)
    return dataclasses.replace(row.machine, rates=rates, units=UNITS[name])


def error(row: Row, sustained: float) -> float:
    """log(predicted / published)."""
    assert row.seconds is not None
    return math.log(predict(row.work, row.layout, with_rates(row, sustained)).seconds / row.seconds)


def errors_of(rows: list[Row]) -> dict[str, list[list[float]]]:
    """By publisher, of each row: its errors at all shares of GRID."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        if row.seconds:
            found.setdefault(row.publisher, []).append([error(row, sustained) for sustained in GRID])
    return found


GRID = [0.8, 0.84, 0.88, 0.92, 0.96, 1.0]


def fit(errors: dict[str, list[list[float]]]) -> int:
    """The index in GRID of the share with the smallest mean error, each publisher counted alike."""
    return min(range(len(GRID)), key=lambda i: mean(mean(abs(row[i]) for row in rows) for rows in errors.values()))


def spread_of(errors: dict[str, list[list[float]]]) -> float:
    """What 90 of 100 errors stay within, where each publisher is predicted with the share of the others. Each publisher
    counts alike, as in `fit`: the next one is another publisher, not another row of one of these."""
    found = []
    for name, rows in errors.items():
        index = fit({other: rows for other, rows in errors.items() if other != name})
        found += [(abs(row[index]), 1 / len(rows)) for row in rows]
    found.sort()
    below = accumulate(weight for _, weight in found)
    return next(error for (error, _), sum_ in zip(found, below, strict=True) if sum_ >= 0.9 * len(errors) - 1e-9)


def halves(errors: dict[str, list[list[float]]]) -> str:
    """The publishers cut into two halves in every way, and each half predicted with share and width of the other."""
    found, holds = [], []
    for chosen in combinations(errors, len(errors) // 2):
        parts: list[dict[str, list[list[float]]]] = [{}, {}]
        for name, rows in errors.items():
            parts[name in chosen][name] = rows
        off, inside = list[float](), list[bool]()
        for judged, others in (parts, parts[::-1]):
            index, wide = fit(others), spread_of(others)
            wrong = [row[index] for rows in judged.values() for row in rows]
            off += [abs(math.expm1(one)) for one in wrong]
            inside += [abs(one) <= wide for one in wrong]
        found.append(mean(off))
        holds.append(mean(inside))
    return (
        f"{len(found)} ways to cut the publishers into halves: mean error {mean(found):.1%}, from {min(found):.1%} to "
        f"{max(found):.1%}; {mean(holds):.0%} of the intervals hold, from {min(holds):.0%} to {max(holds):.0%}"
    )


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv")
    parser.add_argument("--worst", type=int, default=0, help="also list so many rows with the largest errors")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/plan-accuracy.md")
    options = parser.parse_args()
    rows, why = read(options.csv)
    print(f"{len(rows)} rows count; not counted: " + ", ".join(f"{n} ({reason})" for reason, n in why.items()))
    errors = errors_of(rows)
    judged: list[tuple[Row, float, float]] = []  # (row, error, half the width of its interval)
    for name in errors:
        others = {other: found for other, found in errors.items() if other != name}
        index, spread = fit(others), spread_of(others)
        print(f"{name}: {GRID[index]:.2f} of the best product's rate; spread {spread:.2f}")
        timed = [row for row in rows if row.publisher == name and row.seconds]
        judged += [(row, found[index], spread) for row, found in zip(timed, errors[name], strict=True)]
    print(f"all: {GRID[fit(errors)]:.2f} of the best product's rate; spread {spread_of(errors):.2f}")
    print("\n" + halves(errors))
    for name, text in (("accuracy", table(judged)), ("memory", of_memory(rows)), ("out-of-memory", outcomes(rows))):
        print("\n" + text)
        if options.write:
            tables.write("plan-accuracy", name, text)
    for row, wrong, _ in sorted(judged, key=lambda found: -abs(found[1]))[: options.worst]:
        print(f"  {wrong:+.2f}  {row.label}  [{row.publisher}]  {row.seconds:.2f} s")


def table(judged: list[tuple[Row, float, float]]) -> str:
    """By publisher and device."""
    lines = ["| publisher | devices | runs | mean error | median error | bias | intervals that hold |"]
    lines.append("|---|---|---|---|---|---|---|")
    keys = dict.fromkeys((row.publisher, row.kind) for row, _, _ in judged)
    for publisher, kind in [*keys, ("**all**", "")]:
        here = [found for found in judged if not kind or (found[0].publisher, found[0].kind) == (publisher, kind)]
        off = [abs(math.expm1(wrong)) for _, wrong, _ in here]
        bias = math.expm1(mean(wrong for _, wrong, _ in here))
        holds = mean(abs(wrong) <= spread for _, wrong, spread in here)
        device = kind.replace("h100", "H100").replace("a100", "A100").replace("b200", "B200").replace("v100", "V100")
        device = device.replace(" 16", ", 16").replace(" fp8", ", fp8")
        lines.append(
            f"| {publisher} | {device} | {len(here)} | {mean(off):.1%} | {median(off):.1%} | {bias:+.1%} "
            f"| {holds:.0%} |"
        )
    return "\n".join(lines)


def of_memory(rows: list[Row]) -> str:
    """Published memory."""
    known = [row for row in rows if row.memory_gb]
    lines = ["| publisher | runs | memory, mean error | bias |", "|---|---|---|---|"]
    for publisher in dict.fromkeys(row.publisher for row in known):
        ratios = [bytes_of(row) / 1e9 / row.memory_gb for row in known if row.publisher == publisher and row.memory_gb]
        off = mean(abs(ratio - 1) for ratio in ratios)
        lines.append(f"| {publisher} | {len(ratios)} | {off:.1%} | {mean(ratios) - 1:+.1%} |")
    return "\n".join(lines)


def outcomes(rows: list[Row]) -> str:
    """Runs that ended for want of memory."""
    gone = [row for row in rows if row.out_of_memory]
    said = [verdict(row) for row in gone]
    fine = [verdict(row) for row in rows if not row.out_of_memory]
    lines = [
        f"{said.count(NO)} of {len(gone)} are predicted, and of {said.count(MAYBE)} more it is said that memory is "
        f"tight; of {len(fine)} that ran, {fine.count(NO)} are said not to fit, and {fine.count(MAYBE)} to be tight.",
        "", "| run that ended out of memory | predicted GB | of | said |", "|---|---|---|---|",
    ]  # fmt: skip
    for row, word in zip(gone, said, strict=True):
        shown = f"**{word}**" if word == YES else word
        lines.append(f"| {row.label} | {bytes_of(row) / 1e9:.1f} | {row.machine.memory_gb:.1f} | {shown} |")
    return "\n".join(lines)


def verdict(row: Row) -> str:
    """What `isograd plan` says of a run's memory."""
    reserved = row.machine.reserved_gb * 1e9
    share = (bytes_of(row) - reserved) / (row.machine.memory_gb * 1e9 - reserved)
    return NO if share > 1 else MAYBE if share > TIGHT else YES


def bytes_of(row: Row) -> float:
    """What a rank needs, with what its driver and libraries take."""
    found: Any = memory(row.work, row.layout)
    return float(found.total + row.machine.reserved_gb * 1e9)


if __name__ == "__main__":
    main()
