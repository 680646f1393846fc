"""The first hour on GPUs: check and measure what has only been run on CPUs, and write down what happened.

    python -m benchmarks.gpu_first_hour                  # all GPUs of this machine: one is enough, more check more
    python -m benchmarks.gpu_first_hour --minutes 10     # the steps that fit into ten minutes
    python -m benchmarks.gpu_first_hour --cpu 2          # the same steps on two CPU ranks: whether the script works
    ... --nodes 2 --node 0 --at node1 --folder SHARED    # and on node 1 with --node 1: two machines, at the end

Each step is a command that a user would type, or a program of gpu_programs.py, in processes of their own: one that
fails or hangs is written down, and the next one begins. The result is gpu-first-hour.json, a page for a browser beside
it, and a table; docs/gpu.md says what to do with them. With --cpu, programs run on imagined cards
(docs/imagined-gpu.md), in miniature: their times mean nothing. What a step checks:

    one device     losses on the GPU are those on the CPU
    a layout       losses are those of one device; step time and memory stand beside it
    experts        a mixture of experts under ep: losses are those of one device
    proof          gradients of each layout are those of one device, in fp64, by name, over NCCL
    tests          what the imagined cards test, on these: every layout on the default and on a side stream, experts,
                   contrastive losses, checkpoints, other libraries' loops, attention, a card that is full
    resume         a run that is saved and resumed has the bits of one that was not
    bf16           losses are near those of fp32
    waits          how often a step makes the host wait for the GPU, beside its own wait for an event
    speed          a decoder of 1.1 billion parameters in bf16: tokens per second, share of the peak, memory
    beside FSDP2   four blocks of Llama 8B under zero3 and under FSDP2: time, memory, traces, NCCL that is not hidden
    plan           the same blocks of isograd's decoder, on a side stream: time and memory, beside the plan's
    long context   32,768 tokens a device around a ring, with recompute; documents: eight in each sequence
    late rank      one comes late to a step: what torch's flight recorder says that the others wait for
    two nodes      the network check, and a run over both: losses are those of one device
"""

from __future__ import annotations

import argparse
import html
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_programs
from benchmarks.task import Sizes

RECIPE = "quickstart"
STEPS = 12
STOPPED = 75  # the exit code of a run that was asked to stop
NEAR = {"fp32": 2e-3, "bf16": 5e-2}  # of losses after STEPS steps, relative: another device adds in another order
LAYOUTS = (  # N: the number of devices
    "dpN", "dpN zero1", "dpN zero2", "dpN zero3", "tpN", "tpN sp", "cpN ulysses", "cpN ring", "ppN", "ppN vpp2",
)  # fmt: skip
OF_FOUR = ("dpH tp2", "dpH tp2 sp zero3", "dpH pp2 zero1", "dpQ pp4")  # H, Q: a half and a quarter of them
BLOCKS_8B = Sizes(vocab=128256, hidden=4096, layers=4, heads=32, mlp=14336, seq=8192, batch=1)
MINIATURE = Sizes(vocab=256, hidden=128, layers=2, heads=2, mlp=256, seq=64, batch=1)
PORT = int(os.environ.get("MASTER_PORT", "29500"))  # of two nodes, and the next one
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

    def __init__(self, folder: Path, devices: int, on_gpu: bool, nodes: tuple[int, int, str] | None = None) -> None:
        """nodes: how many, this one's number, and the first one's address."""
        self.folder, self.devices, self.on_gpu, self.nodes = folder.resolve(), devices, on_gpu, nodes
        self.sizes = BLOCKS_8B if on_gpu else MINIATURE
        self.reference: list[float] = []  # losses of one device
        self.limit = 0.0  # seconds of a command

    def steps(self) -> Iterator[Step]:
        many = self.devices > 1
        if self.nodes and self.nodes[1]:
            yield Step("two nodes", self.two_nodes, 59)
            return
        yield Step("one device", self.one_device, 5)
        for words in self.layouts():
            yield Step(words, lambda words=words: self.layout(words), 4)
        if many:
            yield Step("experts", self.experts, 5)
            yield Step("proof", self.proof, 12)
        yield Step("tests", self.tests, 15)
        yield Step("resume", self.resume, 6)
        yield Step("bf16", self.bf16, 4 if self.on_gpu else 8)
        yield Step("waits", self.waits, 3)
        if self.on_gpu:
            yield Step("speed", self.speed, 10)
        if many:
            yield Step("beside FSDP2", self.beside_fsdp2, 6)
        yield Step("plan", self.plan, 5)
        ring = f"cp{self.devices} ring" if many else "dp1"
        yield Step("long context", lambda: self.decoder(ring, tokens=4, recompute=True), 5)
        yield Step("documents", lambda: self.decoder(f"dp{self.devices} zero1", documents=8), 5)
        if many:
            yield Step("late rank", self.late_rank, 3)
        if self.nodes:
            yield Step("two nodes", self.two_nodes, 10)

    def layouts(self) -> list[str]:
        found = [*LAYOUTS] if self.devices > 1 else []
        found += OF_FOUR if self.devices % 4 == 0 else []
        counts = {"N": self.devices, "H": self.devices // 2, "Q": self.devices // 4}
        words = ["".join(str(counts.get(letter, letter)) for letter in layout) for layout in found]
        return [layout for layout in words if not layout.startswith("dp1 ")]

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

    def experts(self) -> dict[str, Any]:
        config = self.recipe("moe")
        one = self.train("experts-of-one", "dp1", config=config)
        found = self.train("experts", f"dp{self.devices} ep{self.devices} zero1", config=config)
        near(found["losses"], one["losses"], NEAR["fp32"], "on one device")
        return found

    def proof(self) -> dict[str, Any]:
        layouts = "; ".join(self.layouts())
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

    def tests(self) -> dict[str, Any]:
        """By pytest; a test of more ranks than there are devices skips itself."""
        few = [] if self.on_gpu else ["-k", "dp2-default"]
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", "tests/imagined_cuda", *few]
        said = self.python(*words, hide_gpus=not self.on_gpu).strip().splitlines()
        return {"tests": said[-1] if said else ""}

    def beside_fsdp2(self) -> dict[str, Any]:
        found = {}
        for name in ("isograd", "FSDP2"):
            found[name] = self.on_cards(
                gpu_programs.beside_fsdp2, name, self.sizes, str(self.folder), join=name != "isograd"
            )[0]
        ratio = found["isograd"]["seconds_per_step"] / found["FSDP2"]["seconds_per_step"]
        return found["isograd"] | {"time_of_fsdp2s": ratio, "fsdp2": found["FSDP2"]}

    def plan(self) -> dict[str, Any]:
        layout = f"dp{self.devices}" + (" zero3" if self.devices > 1 else "")
        found = self.decoder(layout)
        name = torch.cuda.get_device_name(0).lower() if self.on_gpu else "h100"
        machine = next((known for known in ("h200", "h100", "a100", "b200") if known in name), None)
        if machine is None:
            return found | {"planned": f"no machine file for {name}"}
        return found | gpu_programs.planned(layout, self.sizes, machine)

    def decoder(self, layout: str, tokens: int = 1, documents: int = 0, recompute: bool = False) -> dict[str, Any]:
        """tokens: of a device, as a multiple of the usual."""
        long = self.devices * tokens if "cp" in layout else tokens
        sizes = replace(self.sizes, seq=self.sizes.seq * long)
        every = self.on_cards(gpu_programs.own_decoder, layout, sizes, documents, recompute)
        if not all(one["losses"] == every[0]["losses"] and one["losses"][-1] < one["losses"][0] for one in every):
            raise Failed(f"losses differ between ranks, or do not fall: {[one['losses'] for one in every]}")
        return every[0]

    def late_rank(self) -> dict[str, Any]:
        first, *_ = self.on_cards(gpu_programs.late, 8.0 if self.on_gpu else 1.0)
        if self.on_gpu and not first["waits_for"]:
            raise Failed(f"the flight recorder names nothing that rank 0 waits for: {first}")
        return first

    def two_nodes(self) -> dict[str, Any]:
        """Started on each of them. The folder is one that all of them see."""
        assert self.nodes is not None
        many, mine, first = self.nodes
        where = ["--node-rank", str(mine), "--master-addr", first, "--master-port"]
        device = [] if self.on_gpu else ["--device", "cpu"]
        wait = ["--wait", "3000" if mine else "120"]  # the others are there all the time that the first one measures
        self.isograd(*f"check network --nnodes {many} --nproc {self.devices}".split(), *where, str(PORT), *wait)
        begin = f"-m torch.distributed.run --nnodes {many} --nproc-per-node {self.devices}".split()
        run, ranks, config = self.folder / "two-nodes", many * self.devices, self.folder / f"two-nodes-{mine}.yaml"
        lines = self.recipe().read_text().splitlines()  # torchrun takes --run for an option of its own
        config.write_text("\n".join(f"run: {run}" if line.startswith("run:") else line for line in lines))
        words = ["-m", "isograd", "train", str(config), "--layout", f"dp{ranks} zero1"]
        self.python(*begin, *where, str(PORT + 1), *words, "--steps", str(STEPS), "--log.every", "1", *device)
        found = read_run(run)
        if not mine:
            near(found["losses"], self.reference, NEAR["fp32"], "on one device")
        return found

    def waits(self) -> dict[str, Any]:
        """In this process, on one device: torch itself says when the host waits, unless it waits for an event."""
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

    def recipe(self, name: str = RECIPE) -> Path:
        path = self.folder / f"{name}{self.nodes[1] if self.nodes else ''}.yaml"
        if not path.exists():
            self.isograd("new", name, str(path))
        return path

    def on_cards(self, program: Callable[..., Any], *args: Any, join: bool = False) -> list[Any]:
        """What it returns on each rank; on a CPU build of torch the cards are imagined."""
        from tests.imagined_cuda import run

        results = run(program, self.devices, *args, join=join, seconds=120, limit=self.limit)
        wrong = [result.error for result in results if result.error]
        wrong += [str(fault) for result in results for fault in result.faults]
        if wrong:
            raise Failed(wrong[0][-2000:])
        return [result.value for result in results]

    def isograd(self, *words: str, hide_gpus: bool = False, ends: tuple[int, ...] = (0,)) -> str:
        return self.python("-m", "isograd", *words, hide_gpus=hide_gpus, ends=ends)

    def python(self, *words: str, hide_gpus: bool = False, ends: tuple[int, ...] = (0,)) -> str:
        command = [sys.executable, *words]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus or not self.on_gpu else {})
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, env=environment, timeout=self.limit
            )
        except subprocess.TimeoutExpired as late:
            raise Failed(f"python {' '.join(words)} had not ended after {self.limit:.0f} s") from late
        with (self.folder / "commands.log").open("a") as log:
            log.write(f"$ python {' '.join(words)}\n{done.stdout}\n{done.stderr}\nended with {done.returncode}\n\n")
        if done.returncode not in ends:
            said = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise Failed(f"python {' '.join(words)} ended with {done.returncode}: {said}")
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


def waits_of_a_step(on_gpu: bool) -> int | None:
    """Of the sixth step: caches are filled by then. None on the CPU, which has nothing to wait for."""
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
    return sum("synchroniz" in str(warning.message) for warning in said) if on_gpu else None


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
        table.add_row(outcome.name, outcome.ended, f"{outcome.seconds:.0f}", *cells, loss, note_of(told)[:300])
    Console(width=max(140, Console().width)).print(table)


IN_COLUMNS = ("losses", "seconds_per_step", "tokens_per_s", "mfu", "memory_gb")


def note_of(told: dict[str, Any]) -> str:
    """What has no column of its own."""
    rest = {name: value for name, value in told.items() if name not in IN_COLUMNS}
    return str(rest.pop("why", "")) or ", ".join(f"{name} {value}" for name, value in rest.items())


def page(document: dict[str, Any]) -> str:
    """The same as one page for a browser, which needs nothing beside it."""
    shown = lambda value: html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))  # noqa: E731
    facts_ = "".join(f"<li>{html.escape(name)}: {shown(value)}</li>" for name, value in document["machine"].items())
    head = ("step", "ended", "s", "s per step", "tokens/s", "of the peak", "GB", "losses", "note")
    rows = ""
    for step in document["steps"]:
        told = step["told"]
        losses = f"{shown(told['losses'][0])} ... {shown(told['losses'][-1])}" if told.get("losses") else ""
        cells = [step["name"], step["ended"], step["seconds"], *(told.get(name, "") for name in IN_COLUMNS[1:])]
        texts = [*map(shown, cells), losses, html.escape(note_of(told))]
        rows += f"<tr class={step['ended'].split()[0]}>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"
    style = "body{font:14px sans-serif}td,th{padding:2px 8px;text-align:left;vertical-align:top}.failed{color:#b00}"
    title = "isograd: the first hour on GPUs"
    columns = "".join(f"<th>{name}</th>" for name in head)
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style><h1>{title}</h1>"
        f"<ul>{facts_}</ul><table><tr>{columns}</tr>{rows}</table>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="later steps that do not fit are left out (60)")
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="on so many CPU ranks: to try the script")
    parser.add_argument("--folder", type=Path, default=Path("gpu-first-hour"), help="where runs and results go")
    parser.add_argument("--nodes", type=int, help="so many machines, each of which starts this script")
    parser.add_argument("--node", type=int, default=0, help="the number of this one, from 0")
    parser.add_argument("--at", default="127.0.0.1", help="the address of the first one")
    chosen = parser.parse_args()
    devices = chosen.cpu or torch.cuda.device_count()
    if not devices:
        raise SystemExit("no GPU is seen by this torch; --cpu 2 tries the script on two CPU ranks")
    if chosen.folder.exists() and not chosen.node:
        raise SystemExit(f"{chosen.folder} exists: results of two hours would mix. Name another with --folder")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    nodes = (chosen.nodes, chosen.node, chosen.at) if chosen.nodes else None
    hour, name = Hour(chosen.folder, devices, not chosen.cpu, nodes), f"gpu-first-hour{chosen.node or ''}"
    end = time.perf_counter() + 60 * chosen.minutes
    outcomes = []
    for step in hour.steps():
        fits = not outcomes or time.perf_counter() + 60 * step.minutes <= end  # others compare with the first
        hour.limit = 60 * step.minutes
        outcome = attempt(step) if fits else Outcome(step.name, "left out")
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.ended}, {outcome.seconds:.0f} s", flush=True)
        document = {"machine": facts(devices, hour.on_gpu), "steps": [asdict(o) for o in outcomes]}
        (chosen.folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        (chosen.folder / f"{name}.html").write_text(page(document))
    show(outcomes)
    sys.exit(any(outcome.ended == "failed" for outcome in outcomes))


if __name__ == "__main__":
    main()
