"""Single operators on one device: isograd's beside torch's and transformers', forward and backward.

    python -m benchmarks.one_device --operators [--rounds 9] [--batch 8]

CPU time of one thread: the median over rounds, in each of which every form of an operator runs once. Memory: the most
that torch's allocator holds at a time above the inputs, gradients of the inputs included. Each form's gradients are
compared with those of the first form of its operator before any is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import isograd as ig
from benchmarks import model as plain
from benchmarks import quiet, report
from benchmarks.task import Sizes
from isograd import nn as own
from isograd.nn.loss import cross_entropy

LIMIT = 1e-5  # fp32: relative to a gradient's norm


@dataclass(frozen=True)
class Form:
    """One way of computing an operator."""

    operator: str
    name: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # whose gradients are made


def forms(sizes: Sizes) -> Iterator[Form]:
    """The first form of each operator is torch's."""
    mesh, key = ig.Mesh.unbound("1"), ig.rng.key(0)
    tokens, heads, wide = sizes.batch * sizes.seq, sizes.heads, sizes.hidden // sizes.heads
    x, weight = normal(tokens, sizes.hidden), normal(sizes.vocab, sizes.hidden, std=0.02)
    labels = torch.randint(sizes.vocab, (tokens,))
    what = "head and cross entropy"
    yield Form(what, "torch", lambda x, w: F.cross_entropy(F.linear(x, w), labels), (x, weight))
    for chunk in (None, 1024, 256):
        name = "isograd" if chunk is None else f"isograd, {chunk} tokens at a time"
        yield Form(what, name, lambda x, w, chunk=chunk: cross_entropy(x, w, labels, mesh, chunk=chunk)[0], (x, weight))

    rotary = own.Rotary(wide, 10000.0)
    cos, sin = rotary.table(torch.arange(sizes.seq).repeat(sizes.batch), torch.float32)
    flat = cos[: sizes.seq, 0], sin[: sizes.seq, 0]
    q = (normal(tokens, heads, wide),)

    def theirs(q: Tensor) -> Tensor:
        from transformers.models.llama.modeling_llama import rotate_half

        q = q.view(sizes.batch, sizes.seq, heads, wide).transpose(1, 2)
        turned: Tensor = q * flat[0] + rotate_half(q) * flat[1]  # apply_rotary_pos_emb does so with queries and keys
        return turned.transpose(1, 2).reshape(tokens, heads, wide)

    yield Form("rotary", "torch", lambda q: plain.turn(q, cos, sin), q)
    yield Form("rotary", "transformers", theirs, q)
    yield Form("rotary", "isograd", lambda q: rotary.turn(q, cos, sin), q)

    norms = nn.RMSNorm(sizes.hidden, eps=1e-6), own.RMSNorm(sizes.hidden, mesh), llama_norm(sizes)
    yield from of_modules("RMSNorm", x, *norms)
    linear = own.ColumnLinear(sizes.hidden, sizes.hidden, mesh, key=key)
    yield from of_modules("linear", x, nn.Linear(sizes.hidden, sizes.hidden, bias=False), linear)
    yield from of_modules("SwiGLU", x, plain.MLP(sizes), own.MLP(sizes.hidden, sizes.mlp, mesh, key=key))


def llama_norm(sizes: Sizes) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(sizes.hidden)  # type: ignore[no-any-return]


def of_modules(what: str, x: Tensor, first: nn.Module, *others: nn.Module) -> Iterator[Form]:
    """Forms with the weights of the first."""
    for name, module in zip(("torch", "isograd", "transformers"), (first, *others), strict=False):
        module.load_state_dict(first.state_dict())
        names = [name for name, _ in first.named_parameters()]
        weights = tuple(module.get_parameter(name) for name in names)
        yield Form(what, name, lambda x, *_, module=module: module(x), (x, *weights))


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape) * std).requires_grad_()


def gradients(form: Form, seed: Tensor | None) -> tuple[Tensor, ...]:
    result = form.run(*form.inputs)
    return torch.autograd.grad(result, form.inputs, None if result.dim() == 0 else seed)


def peak(form: Form, seed: Tensor | None) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        gradients(form, seed)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        top = max(top, held)
    return top


def measured(sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """A row for each form."""
    torch.manual_seed(0)
    rows, every = [], list(forms(sizes))
    for what in dict.fromkeys(form.operator for form in every):
        these = [form for form in every if form.operator == what]
        shape = these[0].run(*these[0].inputs).shape
        seed = torch.randn(shape) if shape else None
        truth = gradients(these[0], seed)
        for form in these:
            for mine, true in zip(gradients(form, seed), truth, strict=True):
                off = float((mine - true).norm() / true.norm())
                if not off < LIMIT:
                    raise AssertionError(f"{what}, {form.name}: a gradient is {off:.0e} off")
        taken: dict[str, list[float]] = {form.name: [] for form in these}
        for number in range(rounds):
            for place in range(len(these)):
                form = these[(place + number) % len(these)]
                began = time.process_time()
                gradients(form, seed)
                taken[form.name].append(time.process_time() - began)
        first = taken[these[0].name]
        for form in these:
            mine = taken[form.name]
            rows.append({
                "operator": what,
                "form": form.name,
                "cpu_s": statistics.median(mine),
                "of_torch": statistics.median(a / b for a, b in zip(mine, first, strict=True)),
                "peak_bytes": peak(form, seed),
            })  # fmt: skip
    return rows


def main(chosen: argparse.Namespace) -> None:
    if not chosen.anyway:
        quiet.refuse_noise()
    torch.set_num_threads(1)
    sizes = replace(Sizes(), batch=chosen.batch)
    rows = measured(sizes, chosen.rounds)
    shape = f"{sizes.batch} x {sizes.seq} tokens, width {sizes.hidden}, fp32, one thread"
    title = f"operators, forward and backward: {shape}"
    document = {"title": title, "machine": report.machine(), "rows": rows}
    report.OUT.mkdir(exist_ok=True)
    path = report.OUT / f"one_device_operators{'' if sizes.batch == Sizes().batch else f'-batch{sizes.batch}'}.json"
    for file in [path, *([chosen.json] if chosen.json else [])]:
        file.write_text(json.dumps(document, indent=1) + "\n")
    show(title, rows)
    print(f"written: {path.relative_to(report.OUT.parent.parent)}")


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for number, heading in enumerate(("operator", "form", "CPU ms", "of torch's", "peak, MiB")):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for r in rows:
        cells = [f"{r['cpu_s'] * 1e3:.2f}", f"{r['of_torch']:.2f}", f"{r['peak_bytes'] / report.MIB:.1f}"]
        table.add_row(r["operator"], r["form"], *cells)
    Console(width=max(100, Console().width)).print(table)
