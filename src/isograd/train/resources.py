"""What a run needs and what this machine has: memory by formula, devices, and their peak speed.

plan/memory.py has the formulas. Parameters of isograd's decoder are counted by formula, those of a model of
transformers on its class or in its file; its activations are those of a usual decoder or encoder.
tests/train/test_resources.py compares with what autograd saves and with the peak of a process.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.hf.configs import load_config
from isograd.hf.quantized import BYTES
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.models import Transformer, TransformerConfig
from isograd.plan.memory import Memory, of_stage, states
from isograd.plan.work import Work, params_on_rank
from isograd.train.config import Config
from isograd.train.task import DTYPES

PROGRAM = 300e6  # bytes of a rank before it has a model: most are torch's libraries

# Dense bf16 tensor-core TFLOPS as their makers state them.
BF16 = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10G": 70.0}
PER_CORE = 4  # ranks that share one CPU core at most


@dataclass(frozen=True)
class LocalMachine:
    """Where local ranks would run. On GPUs a rank has one device for itself; on CPUs ranks share cores and memory."""

    gpu: str | None  # its name; None: no GPU
    devices: int  # GPUs, or CPU cores
    memory: float  # bytes of one GPU, or of the whole machine

    @property
    def most_ranks(self) -> int:
        """How many ranks may be started here."""
        return self.devices if self.gpu else PER_CORE * self.devices

    def describe(self) -> str:
        """For people: '2 CPU cores, 23.5 GB' or '8 GPUs H100, 80.0 GB each'."""
        many = "" if self.devices == 1 else "s"
        if self.gpu:
            return f"{self.devices} GPU{many} {self.gpu}, {self.memory / 1e9:.1f} GB each"
        return f"{self.devices} CPU core{many}, {self.memory / 1e9:.1f} GB"


def this_machine(device: Literal["cpu"] | None = None) -> LocalMachine:
    """What this process may use: its GPUs, unless a run wants the CPU; or its cores and its container's memory."""
    if device is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return LocalMachine(properties.name, torch.cuda.device_count(), float(properties.total_memory))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return LocalMachine(None, cores, min(memory, _container_limit()))


def _container_limit() -> float:
    """Bytes that Linux's control groups allow; infinite where nothing is limited or known."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal():
            return float(text)
    return float("inf")


def peak_flops(device: torch.device, config: Config) -> float | None:
    """The most FLOPS of one device, for MFU; None where it is not known. fp32 runs at a fraction of the bf16 peak."""
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops * 1e12
    if device.type != "cuda" or config.model.dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in BF16.items() if part in name), None)


def most_memory(device: torch.device) -> float:
    """The most bytes this rank has held."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Forecast:
    """What the ranks of a run need."""

    stages: list[Memory]  # of a rank of each pipeline stage
    parameters: int  # of the whole model
    trained: int  # of those; fewer with adapters

    @property
    def largest(self) -> Memory:
        """Of the stage whose ranks need most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def rank_bytes(self) -> float:
        """Bytes of the rank that needs most, with its program: a bound."""
        return self.largest.total + PROGRAM

    def all_bytes(self, ranks: int) -> float:
        """Bytes of all ranks together."""
        return sum(stage.total + PROGRAM for stage in self.stages) * ranks / len(self.stages)


def forecast(config: Config) -> Forecast:
    """What a rank of each pipeline stage needs; ranks that differ in another index need the same or less."""
    layout = Layout.parse(config.layout)
    if config.pairs is not None:
        return _encoder(config, layout)
    if config.by_transformers:
        return _library(config, layout)
    work = work_of(config)
    for index in range(layout.pp):  # a layout that does not fit the model is refused by the layers themselves
        rank = layout.rank({"pp": index, "dp": 0, "cp": 0, "tp": 0})
        Transformer(work.model, Mesh.unbound(layout, rank), device="meta")
    count = int(params_on_rank(work, Layout(), 0).all)
    stages = [of_stage(work, layout, index) for index in range(layout.pp)]
    if config.distil is not None:
        stages[-1] = _with_frozen(stages[-1], load_config(config.distil.teacher), work, layout)
    if config.grpo is not None and config.grpo.kl:
        stages[-1] = _with_frozen(stages[-1], work.model, work, layout)
    return Forecast(stages, count, count)


def _with_frozen(stage: Memory, model: TransformerConfig, work: Work, layout: Layout) -> Memory:
    """The last stage with a second model, cut as the first is or, under pp, whole; and all logits of both."""
    taught_by = replace(work, model=model)
    weights = params_on_rank(taught_by, layout if layout.pp == 1 else Layout(), 0).all * work.size
    logits = work.tokens(layout) * work.model.vocab * 2 * (work.size + 3 * work.sum_bytes)
    return replace(stage, parameters=stage.parameters + weights, activations=stage.activations + logits)


def work_of(config: Config) -> Work:
    """What a step of a language model's run computes, as plan/ counts it."""
    from isograd.train.language import model_config

    assert config.data is not None
    return Work(
        model=model_config(config),
        length=config.data.length,
        batch=config.batch * (2 if config.task == "preference" else 1),  # rows: answers
        micro_batches=config.micro_batches,
        dtype=config.model.dtype,
        products="fp8" if config.model.float8 and not config.model.float8_emulate else None,
        recompute={False: "none", "selective": "selective"}.get(config.model.recompute, "full"),
        masked=config.packing != "stream",
        muon=config.optimizer.name == "muon",
        accumulate=config.accumulate,
        ema=config.ema is not None,
    )


def _library(config: Config, layout: Layout) -> Forecast:
    """A model of transformers: parameters counted on its class, activations as usual decoders have."""
    from isograd.train.library import counted

    assert config.data is not None
    found = counted(config)
    size, owners = DTYPES[config.model.dtype].itemsize, layout.dp * layout.cp
    cut, blocks = layout.tp * layout.pp, max(1, found.layers)
    bits = config.adapter.base_bits if config.adapter is not None else None
    packed = found.adapted if bits else 0
    trained, frozen = found.trained / cut, (found.parameters - found.trained - packed) / cut
    gathered = 3 * trained / blocks  # a block, the next one, and what is in no block
    kept = states(
        layout, size, trained, trained / owners, gathered, 0, whole=_keeps_whole(config), ema=bool(config.ema)
    )
    fixed = frozen / owners + 3 * frozen / blocks if layout.zero == 3 else frozen
    rows = -(-config.batch // layout.dp) * (2 if config.task == "preference" else 1)
    flight = min(layout.pp, config.micro_batches)
    tokens = -(-rows // config.micro_batches) * config.data.length / layout.cp
    blocks_here = 2 if config.model.recompute else found.layers / layout.pp + 1
    block = tokens * (12 * found.hidden + 3 * found.mlp) * size / layout.tp
    logits = tokens * found.vocab * (size + 8) / (1 if config.pads_rows else layout.tp)
    saved = flight * blocks_here * block + logits
    stage = Memory(kept[0] + fixed * size + packed / cut * BYTES[bits or 8], kept[1], kept[2], saved)
    return Forecast([stage] * layout.pp, found.parameters, found.trained)


def _encoder(config: Config, layout: Layout) -> Forecast:
    """An encoder of transformers: parameters counted in its file, activations of a chunk as usual encoders have."""
    assert config.pairs is not None
    path = Path(config.model.path or "")
    count = sum(math.prod(shape) for shape in SafetensorsReader(path).shapes.values())
    described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    hidden = int(described.get("hidden_size") or described.get("dim") or 0)
    layers = int(described.get("num_hidden_layers") or described.get("n_layers") or 0)
    mlp = int(described.get("intermediate_size") or described.get("hidden_dim") or 4 * hidden)
    size = DTYPES[config.model.dtype].itemsize
    tokens = min(config.pairs.chunk, math.ceil(config.batch / layout.dp)) * config.pairs.length
    kept = tokens * (layers + 1) * (12 * hidden + 2 * mlp) * size
    vectors = 6 * config.batch * hidden * 4  # representations of both towers, their gradients, a tile of scores
    owned = count / (layout.dp * layout.cp)
    states_of = states(layout, size, count, owned, count, 0, whole=_keeps_whole(config), ema=bool(config.ema))
    return Forecast([Memory(*states_of, kept + vectors)], count, count)


def _keeps_whole(config: Config) -> bool:
    return config.micro_batches > 1 and config.accumulate == "local"
