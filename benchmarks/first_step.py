"""From the start of a process to the end of its first step on one device: isograd beside transformers and plain torch.

    python -m benchmarks.one_device --first [--rounds 5]

Each contestant is a fresh process that says when its imports, its model (with the optimizer) and its first step were
done. The order rotates from round to round; medians of the clock since the process was started, and of the CPU time
that it has used. The files of all of them are in the system's cache after a round that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import quiet, report
from benchmarks.task import Sizes

SAY = """
import json, sys, time
def done(what):
    print(json.dumps([what, time.time() - float(sys.argv[1]), time.process_time()]), flush=True)
"""
MODEL = "vocab={vocab}, hidden={hidden}, layers={layers}, heads={heads}, mlp={mlp}"
LLAMA = (
    "vocab_size={vocab}, hidden_size={hidden}, num_hidden_layers={layers}, num_attention_heads={heads}, "
    "intermediate_size={mlp}"
)
STEP = """
tokens = torch.randint({vocab}, ({batch}, {seq}))
"""
PROGRAMS = {
    "plain torch": f"""
import torch
from benchmarks.model import Decoder
from benchmarks.task import Sizes
torch.set_num_threads(1)
done("import")
model = Decoder(Sizes({MODEL}, seq={{seq}}))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
done("model"){STEP}
model(tokens, tokens).backward()
optimizer.step()
done("step")
""",
    "transformers' Llama": f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
done("import")
model = LlamaForCausalLM(LlamaConfig({LLAMA})).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
done("model"){STEP}
model(tokens, labels=tokens, use_cache=False).loss.backward()
optimizer.step()
done("step")
""",
    "isograd": f"""
import torch
import isograd as ig
torch.set_num_threads(1)
done("import")
mesh = ig.Mesh("dp1")
model = ig.models.Transformer(ig.models.TransformerConfig({MODEL}), mesh)
engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=3e-4, fused=True))
done("model"){STEP}
loss, count = model(tokens, tokens)
engine.backward(loss, weight=count)
engine.step()
done("step")
""",
}
PHASES = ("import", "model", "step")

Times = dict[str, tuple[float, float]]  # what was done -> (clock, CPU time) since the process was started


def main(chosen: argparse.Namespace) -> None:
    if not chosen.anyway:
        quiet.refuse_noise()
    sizes = Sizes(batch=chosen.batch)
    names = list(PROGRAMS)
    found: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(chosen.rounds + 1):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            times = once(name, sizes)
            found[name] += [times] if number else []
    title = f"to the end of the first step: {sizes.batch} x {sizes.seq} tokens, one thread, median of {chosen.rounds}"
    rows = {name: row(times) for name, times in found.items()}
    document = {"title": title, "machine": report.machine(), "rows": rows}
    report.OUT.mkdir(exist_ok=True)
    path = report.OUT / "one_device_first.json"
    for file in [path, *([chosen.json] if chosen.json else [])]:
        file.write_text(json.dumps(document, indent=1) + "\n")
    show(title, rows)
    print(f"written: {path.relative_to(report.OUT.parent.parent)}")


def once(name: str, sizes: Sizes) -> Times:
    """One process."""
    program = SAY + PROGRAMS[name].format(**vars(sizes))
    command = [sys.executable, "-c", program, str(time.time())]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    said = [json.loads(line) for line in lines.splitlines()]
    return {what: (clock, cpu) for what, clock, cpu in said}


def row(times: list[Times]) -> dict[str, dict[str, float]]:
    return {
        phase: {kind: statistics.median(t[phase][i] for t in times) for i, kind in enumerate(("clock_s", "cpu_s"))}
        for phase in PHASES
    }


def show(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title=title)
    headings = [f"{phase}, {kind}" for kind in ("s", "CPU s") for phase in ("imports", "model", "first step")]
    for number, heading in enumerate(["contestant", *headings]):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for name, found in rows.items():
        cells = [f"{found[phase][kind]:.2f}" for kind in ("clock_s", "cpu_s") for phase in PHASES]
        table.add_row(name, *cells)
    Console(width=max(130, Console().width)).print(table)


if __name__ == "__main__":
    raise SystemExit("python -m benchmarks.one_device --first")
