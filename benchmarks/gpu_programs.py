"""What the first hour on GPUs runs on each rank: `run` of tests/imagined_cuda starts these, on real cards or imagined ones.

gpu_first_hour.py says when, and how large.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.imagined_race import CLIP, adamw, fsdp2_step, isograd_step
from benchmarks.task import Sizes

WARMUP, STEPS = 3, 5
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}  # in newer torch, and before
Spans = list[tuple[float, float]]


def beside_fsdp2(contestant: str, sizes: Sizes, folder: str) -> dict[str, Any]:
    """One and the same plain decoder under FSDP2 and under isograd's zero3: time, memory, and what a trace shows."""
    step = fsdp2_step(sizes) if contestant == "FSDP2" else isograd_step(f"dp{os.environ['WORLD_SIZE']} zero3", sizes)
    rank = dist.get_rank()
    found = measured(lambda: step(rank), sizes.seq * dist.get_world_size())
    trace = Path(folder, f"{contestant}-rank-{rank}.trace.json")
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
        step(rank)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(trace))
    return found | overlap(json.loads(trace.read_text())["traceEvents"]) | {"trace": trace.name}


def own_decoder(layout: str, sizes: Sizes, documents: int = 0, recompute: bool = False) -> dict[str, Any]:
    """isograd's decoder in bf16 under a layout, on a stream of its own. documents: in each sequence."""
    import isograd as ig

    mesh, config = ig.Mesh(layout), config_of(sizes)
    with torch.cuda.stream(torch.cuda.Stream()):
        model = ig.models.Transformer(config, mesh, dtype=torch.bfloat16).to(mesh.device)
        model.recompute = recompute
        engine = ig.Engine(model, mesh, adamw, clip=CLIP)
        source = torch.Generator().manual_seed(mesh.index("dp"))
        text = torch.randint(sizes.vocab, (1, sizes.seq + 1), generator=source).to(mesh.device)
        batch = {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
        if documents:
            batch["documents"] = (torch.arange(sizes.seq, device=mesh.device) * documents // sizes.seq)[None]
        losses: list[float] = []
        found = measured(lambda: losses.append(engine.train_step(batch).loss), sizes.seq * mesh.size("dp"))
    return found | {"losses": losses}


def config_of(sizes: Sizes) -> Any:
    from isograd.models import TransformerConfig

    return TransformerConfig(
        vocab=sizes.vocab, hidden=sizes.hidden, layers=sizes.layers, heads=sizes.heads, mlp=sizes.mlp
    )


def planned(layout: str, sizes: Sizes, machine: str) -> dict[str, float]:
    """What `isograd plan` expects of `own_decoder`."""
    from isograd.core.layout import Layout
    from isograd.plan.machine import load
    from isograd.plan.memory import memory
    from isograd.plan.step_time import predict
    from isograd.plan.work import Work

    on = Layout.parse(layout)
    work = Work(config_of(sizes), sizes.seq, on.dp, 1)
    seconds, memory_gb = predict(work, on, load(machine)).seconds, memory(work, on, gpu=True).total / 1e9
    return {"planned_seconds": seconds, "planned_memory_gb": memory_gb}


def measured(step: Callable[[], Any], tokens: int) -> dict[str, Any]:
    """Seconds of a step, when it is warm, and the peak of memory."""
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    memory = torch.cuda.max_memory_allocated() / 1e9
    return {"seconds_per_step": seconds, "tokens_per_s": tokens / seconds, "memory_gb": memory}


def overlap(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of a trace's kernels: how long NCCL's ran, for how long of that nothing else did, and all; in milliseconds."""
    kernels = [one for one in events if one.get("cat") == "kernel"]
    sent, rest = (
        union((one["ts"], one["ts"] + one["dur"]) for one in kernels if ("nccl" in one["name"].lower()) is of_nccl)
        for of_nccl in (True, False)
    )
    nccl, others, busy = (sum(end - start for start, end in spans) / 1e3 for spans in (sent, rest, union(sent + rest)))
    return {"nccl_ms": nccl, "exposed_ms": busy - others, "busy_ms": busy}


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Spans of time that do not meet, in their order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def late(seconds: float) -> dict[str, Any]:
    """The last rank comes late to a step. Meanwhile the others read torch's flight recorder: what they wait for."""
    os.environ.update(RECORDER)
    import isograd as ig

    mesh = ig.Mesh(f"dp{os.environ['WORLD_SIZE']}")
    layer = torch.nn.Linear(64, 64, device=mesh.device)
    engine = ig.Engine(layer, mesh, adamw)
    said: dict[str, Any] = {"recorder": "none in this build of torch", "waits_for": []}

    def look() -> None:
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        if dump is not None:
            entries = json.loads(dump(True, True))["entries"]
            said["recorder"] = f"{len(entries)} entries"
            said["waits_for"] = [one["profiling_name"] for one in entries if one["state"] != "completed"]

    def step() -> float:
        engine.backward(layer(torch.ones(2, 64, device=mesh.device)).square().mean(), weight=2)
        return float(engine.step().loss)

    step()
    timer = threading.Timer(seconds / 2, look)
    timer.start()
    if mesh.rank == mesh.layout.world_size - 1:
        time.sleep(seconds)
    said["losses"] = [step()]
    timer.join()
    return said
