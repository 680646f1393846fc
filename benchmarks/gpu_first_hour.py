"""The first hour on GPUs: check and measure what has only been run on CPUs, and write down what happened.

    python -m benchmarks.gpu_first_hour                  # all GPUs of this machine: one is enough, more check more
    python -m benchmarks.gpu_first_hour --minutes 10     # the steps that fit into ten minutes
    python -m benchmarks.gpu_first_hour --cpu 2          # the same steps on two CPU ranks: whether the script works

Each step is a command that a user would type, in a process of its own: one that fails or hangs is written down, and the
next one begins. The result is gpu-first-hour.json and a table; docs/gpu.md says what to do with
them. What a step checks:

    one device     losses on the GPU are those on the CPU
    a layout       losses are those of one device; step time and memory stand beside it
    proof          gradients of each layout are those of one device, in fp64, by name, over NCCL
    resume         a run that is saved and resumed has the bits of one that was not
    bf16           losses are near those of fp32
    waits          how often a step makes the host wait for the GPU
    speed          a decoder of 1.1 billion parameters in bf16: tokens per second, share of the peak, memory
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RECIPE = "quickstart"
STEPS = 12
STOPPED = 75  # the exit code of a run that was asked to stop
NEAR = {"fp32": 2e-3, "bf16": 5e-2}  # of losses after STEPS steps, relative: another device adds in another order
LAYOUTS = (  # N: the number of devices
    "dpN", "dpN zero1", "dpN zero2", "dpN zero3", "tpN", "tpN sp", "cpN ulysses", "cpN ring", "ppN", "ppN vpp2",
)  # fmt: skip
SPEED = """\
version: 1
run: runs/speed
layout: dp1
model:
  dtype: bf16
  recompute: true
  options:
    {vocab: 257, hidden: 2048, layers: 16, heads: 32, kv_heads: 8, head_dim: 64, mlp: 8192, norm_eps: 1e-5,
     rope_theta: 500000.0, max_positions: 4096}
data: {sources: [{builtin: stdlib}], length: 2048}
optimizer: {lr: 3e-4, warmup: 2}
steps: 12
batch: 4
"""


@dataclass
class Outcome:
    """What one step came to."""

    name: str
    ended: str = "passed"  # or "failed", "left out"
    seconds: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    name: str
    do: Callable[[], dict[str, Any]]
    minutes: float  # at most


class Failed(Exception):
    """What was seen, and what was expected."""


class Hour:
    """All steps on this machine's devices."""

    def __init__(self, folder: Path, devices: int, on_gpu: bool) -> None:
        self.folder, self.devices, self.on_gpu = folder, devices, on_gpu
        self.reference: list[float] = []  # losses of one device
        self.limit = 0.0  # seconds of a command

    def steps(self) -> Iterator[Step]:
        yield Step("one device", self.one_device, 5)
        for layout in LAYOUTS if self.devices > 1 else ():
            words = layout.replace("N", str(self.devices))
            yield Step(words, lambda words=words: self.layout(words), 4)
        if self.devices > 1:
            yield Step("proof", self.proof, 12)
        yield Step("resume", self.resume, 6)
        yield Step("bf16", self.bf16, 4 if self.on_gpu else 8)
        yield Step("waits", self.waits, 3)
        if self.on_gpu:
            yield Step("speed", self.speed, 10)

    def one_device(self) -> dict[str, Any]:
        found = self.train("one", "dp1")
        self.reference = found["losses"]
        if self.on_gpu:
            host = self.train("host", "dp1", hide_gpus=True)
            near(found["losses"], host["losses"], NEAR["fp32"], "on the CPU")
        return found

    def layout(self, words: str) -> dict[str, Any]:
        found = self.train(words.replace(" ", "-"), words)
        near(found["losses"], self.reference, NEAR["fp32"], "on one device")
        return found

    def proof(self) -> dict[str, Any]:
        layouts = "; ".join(words.replace("N", str(self.devices)) for words in LAYOUTS)
        path = self.folder / "proof.json"
        self.isograd("verify", str(self.recipe()), "--layouts", layouts, "--json", str(path))
        return {"layouts": layouts, "report": path.name}

    def resume(self) -> dict[str, Any]:
        layout, half = f"dp{self.devices}", str(STEPS // 2)
        whole = self.train("whole", layout, "--checkpoint.every", half)
        self.train("halves", layout, "--checkpoint.every", half, "--until", half, ends=(0, STOPPED))
        again = self.train("halves", layout, "--checkpoint.every", half)
        if whole["losses"] != again["losses"]:
            raise Failed(
                f"losses {again['losses']} of the resumed run, {whole['losses']} of the one that was not stopped"
            )
        return again

    def bf16(self) -> dict[str, Any]:
        found = self.train("bf16", f"dp{self.devices}", "--model.dtype", "bf16")
        near(found["losses"], self.reference, NEAR["bf16"], "in fp32")
        return found

    def waits(self) -> dict[str, Any]:
        """In this process, on one device: torch itself says when the host waits."""
        return {"waits_of_a_step": waits_of_a_step(self.on_gpu)}

    def speed(self) -> dict[str, Any]:
        """Llama 3.2 1B's layers. Bytes are its tokens, so its vocabulary is small: nothing is downloaded."""
        config = self.folder / "speed.yaml"
        config.write_text(SPEED)
        layout = f"dp{self.devices}" + (" zero2" if self.devices > 1 else "")
        return self.train("speed", layout, "--batch", str(4 * self.devices), config=config)

    # -- commands

    def train(
        self,
        name: str,
        layout: str,
        *options: str,
        config: Path | None = None,
        hide_gpus: bool = False,
        ends: tuple[int, ...] = (0,),
    ) -> dict[str, Any]:
        """Run it to its end, and read what it wrote."""
        run = self.folder / name
        base = config or self.recipe()
        command = ["train", str(base), "--run", str(run), "--layout", layout, "--steps", str(STEPS), "--log.every", "1"]
        self.isograd(*command, *options, hide_gpus=hide_gpus, ends=ends)
        return read_run(run)

    def recipe(self) -> Path:
        path = self.folder / f"{RECIPE}.yaml"
        if not path.exists():
            self.isograd("new", RECIPE, str(path))
        return path

    def isograd(self, *words: str, hide_gpus: bool = False, ends: tuple[int, ...] = (0,)) -> str:
        command = [sys.executable, "-m", "isograd", *words]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus or not self.on_gpu else {})
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, env=environment, timeout=self.limit
            )
        except subprocess.TimeoutExpired as late:
            raise Failed(f"isograd {' '.join(words)} had not ended after {self.limit:.0f} s") from late
        with (self.folder / "commands.log").open("a") as log:
            log.write(f"$ isograd {' '.join(words)}\n{done.stdout}\n{done.stderr}\nended with {done.returncode}\n\n")
        if done.returncode not in ends:
            raise Failed(f"isograd {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout


def read_run(run: Path) -> dict[str, Any]:
    """Losses of all steps; speed and memory of the later half."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "seconds_per_step" in line}
    later = [steps[number] for number in sorted(steps)][len(steps) // 2 :]
    return {
        "losses": [steps[number]["loss"] for number in sorted(steps)],
        "seconds_per_step": min(line["seconds_per_step"] for line in later),
        "tokens_per_s": max(line["per_s"] for line in later),
        "mfu": later[-1]["mfu"],
        "memory_gb": later[-1]["memory_gb"],
    }


def near(found: list[float], expected: list[float], share: float, where: str) -> None:
    """Refuse losses that differ by more than that share, or of which one is missing."""
    if not expected:
        raise Failed("the run that this one is compared with failed")
    off = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    if not max(off) <= share:
        raise Failed(
            f"losses {found}; {where}: {expected}; they differ by {max(off):.1e}, at most {share:.0e} is expected"
        )


def waits_of_a_step(on_gpu: bool) -> int:
    """Of the sixth step: caches are filled by then."""
    import isograd as ig

    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    mesh = ig.Mesh("dp1")
    config = ig.models.TransformerConfig(vocab=257, hidden=256, layers=4, heads=4, mlp=512)
    model = ig.models.Transformer(config, mesh).to(device)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True), clip=1.0)
    ids = torch.randint(257, (2, 65), device=device)
    for number in range(6):
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn" if number == 5 else "default")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss, tokens = model(ids[:, :-1], ids[:, 1:])
            engine.backward(loss, weight=tokens)
            engine.step()
    if on_gpu:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in said)


def facts(devices: int, on_gpu: bool) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(i) for i in range(devices)] if on_gpu else [platform.processor()] * devices
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda}
    if on_gpu:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"devices": names, **versions, "system": platform.platform()}


def attempt(step: Step) -> Outcome:
    began = time.perf_counter()
    outcome = Outcome(step.name)
    try:
        outcome.told = step.do()
    except Failed as failure:
        outcome.ended, outcome.told = "failed", {"why": str(failure)}
    except Exception as error:  # the next steps say more than this one's end
        outcome.ended, outcome.told = "failed", {"why": f"{type(error).__name__}: {error}"}
    outcome.seconds = time.perf_counter() - began
    return outcome


def show(outcomes: list[Outcome]) -> None:
    table = Table("step", "ended", "s", "ms per step", "tokens/s", "of the peak", "GB", "last loss", "why")
    for outcome in outcomes:
        told = outcome.told
        numbers = [told.get("seconds_per_step"), told.get("tokens_per_s"), told.get("mfu"), told.get("memory_gb")]
        shown = [(1e3, "{:.1f}"), (1, "{:.0f}"), (1, "{:.1%}"), (1, "{:.2f}")]
        cells = ["" if n is None else form.format(n * by) for n, (by, form) in zip(numbers, shown, strict=True)]
        loss = f"{told['losses'][-1]:.4f}" if told.get("losses") else ""
        note = told.get("why", "") or ", ".join(f"{k} {v}" for k, v in told.items() if k == "waits_of_a_step")
        table.add_row(outcome.name, outcome.ended, f"{outcome.seconds:.0f}", *cells, loss, note[:300])
    Console(width=max(140, Console().width)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="steps that do not fit are left out (default 60)")
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="on so many CPU ranks: to try the script")
    parser.add_argument("--folder", type=Path, default=Path("gpu-first-hour"), help="where runs and results go")
    chosen = parser.parse_args()
    devices = chosen.cpu or torch.cuda.device_count()
    if not devices:
        raise SystemExit("no GPU is seen by this torch; --cpu 2 tries the script on two CPU ranks")
    if chosen.folder.exists():
        raise SystemExit(f"{chosen.folder} exists: results of two hours would mix. Name another with --folder")
    chosen.folder.mkdir(parents=True)
    hour = Hour(chosen.folder, devices, on_gpu=not chosen.cpu)
    end = time.perf_counter() + 60 * chosen.minutes
    outcomes = []
    for step in hour.steps():
        fits = time.perf_counter() + 60 * step.minutes <= end
        hour.limit = 60 * step.minutes
        outcome = attempt(step) if fits else Outcome(step.name, "left out")
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.ended}, {outcome.seconds:.0f} s", flush=True)
        document = {"machine": facts(devices, hour.on_gpu), "steps": [asdict(o) for o in outcomes]}
        (chosen.folder / "gpu-first-hour.json").write_text(json.dumps(document, indent=1) + "\n")
    show(outcomes)
    sys.exit(any(outcome.ended == "failed" for outcome in outcomes))


if __name__ == "__main__":
    main()
