"""The peak of a rank's memory: as a rehearsal predicts it, beside what running ranks measure.

    python -m benchmarks.rehearsed_memory [--only "dp2 zero1"]
    python -m benchmarks.rehearsed_memory --write               # writes the table into docs/plan-accuracy.md

Gloo ranks on this machine build the model, take a step and delete everything, so that libraries, connections and the
buffers that they keep are there; then they build it again. Measured is the most resident memory of the second step then
(VmHWM, which Linux lets a process reset) above what the process had before. Nothing is fitted.

Each piece of 64 KB or more is mapped by itself and unmapped when it is given back (M_MMAP_THRESHOLD), so that resident
memory is what the program holds; a prediction counts the pages that such a piece touches (`mapped`). --resident leaves
the C library's allocator as it is, which keeps and scatters pieces.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import tables
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.launcher.launch import World
from isograd.models import Transformer, TransformerConfig
from isograd.plan.rehearse import rehearse, without_memory

OPTIONS: dict[str, Any] = {"vocab": 2048, "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 688}
ROWS, LENGTH = 8, 128  # of a data rank
MAPPED = 1 << 16  # bytes from which on a piece is mapped by itself
PAGE, BEFORE = 4096, 64  # of a mapped piece: torch's tensors begin 64 bytes after its first page does


class Case(NamedTuple):
    """What is run."""

    layout: str
    micro_batches: int = 1
    recompute: bool = False


CASES = (
    *(Case(layout) for layout in ("dp1", "dp2 zero1", "dp2 zero3", "tp2 sp", "cp2 ulysses", "cp2 ring")),
    *(Case(layout, 2) for layout in ("pp2", "dp2 zero1", "dp2 zero2", "pp2 vpp2", "pp2 zb")),
    *(Case(layout, recompute=True) for layout in ("dp2 zero1", "dp2 zero3", "tp2 sp")),
    *(Case(layout) for layout in ("dp2", "dp2 zero2", "tp2", "dp2 tp2 sp zero1", "dp4 zero3", "dp2 cp2 ring zero2")),
    Case("dp2 pp2 zero1", 2),
)


def build(case: Case, device: str | None, mesh: Mesh) -> tuple[Engine, Any, int]:
    """A model, its engine and a batch."""
    model = Transformer(TransformerConfig.from_dict(OPTIONS), mesh, device=device)
    model.recompute = case.recompute
    if device == "meta":
        without_memory(model)
    engine = Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), clip=1.0)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return engine, (tokens, tokens), case.micro_batches


def mapped(size: int) -> int:
    """The bytes of the pages that a piece touches."""
    return -(-(size + BEFORE) // PAGE) * PAGE if size >= MAPPED else -(-size // BEFORE) * BEFORE


def status(name: str) -> int:
    """Bytes, of /proc/self/status."""
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) * 1024


def measured(case: Case, resident: bool) -> int:
    """On a rank: bytes at the peak of the second step, above those before the model was built."""
    c_library = ctypes.CDLL(None)
    if not resident:
        c_library.mallopt(-3, MAPPED)  # M_MMAP_THRESHOLD
    engine, batch, micro_batches = build(case, None, Mesh(case.layout))
    engine.train_step(batch, micro_batches)
    del engine, batch
    gc.collect()
    c_library.malloc_trim(0)
    before = status("VmRSS")
    engine, batch, micro_batches = build(case, None, Mesh(case.layout))
    engine.train_step(batch, micro_batches)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    engine.train_step(batch, micro_batches)
    return status("VmHWM") - before


def rows(only: str | None, resident: bool) -> Iterator[str]:
    """The lines of the table."""
    yield "| layout | micro-batches | recompute | predicted, MB | measured, MB | ratio | where the peak stands |"
    yield "|---|---|---|---|---|---|---|"
    ratios = []
    for size in (1, 2, 4):
        with World(size) as world:
            for case in CASES:
                layout = Layout.parse(case.layout)
                if layout.world_size != size or only not in (None, case.layout):
                    continue
                peak = max(world.run(measured, case, resident))
                found = rehearse(partial(build, case, "meta"), layout, taken=mapped)
                top = max(found, key=lambda rank: rank.peak.bytes)
                ratios.append(top.peak.bytes / peak)
                yield (
                    f"| {case.layout} | {case.micro_batches} | {'yes' if case.recompute else ''} "
                    f"| {top.peak.bytes / 1e6:.1f} | {peak / 1e6:.1f} | {ratios[-1]:.3f} "
                    f"| rank {top.rank}, {top.peak.when} |"
                )
    near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    below = sum(ratio < 0.98 for ratio in ratios)
    yield ""
    yield f"{near} of {len(ratios)} are within 5 %; {below} are below by more than 2 %."


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="one layout")
    parser.add_argument("--resident", action="store_true", help="with the C library's allocator as it is")
    parser.add_argument("--write", action="store_true", help="write the table into docs/plan-accuracy.md")
    options = parser.parse_args()
    lines = []
    for line in rows(options.only, options.resident):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        tables.write("plan-accuracy", "rehearsed-memory", "\n".join(lines))


if __name__ == "__main__":
    main()
