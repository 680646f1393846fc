"""Random runs in which options of the Engine, layouts and calls meet: each step is compared with one device's.

    python -m tests.parity.compositions 100 0      # a hundred runs from seed 0, by hand

A case is drawn from its seed: ranks, layout, ZeRO stage, model, what is frozen, options, optimizer, and a sequence of
calls. Ranks are threads. The one device is plain torch: it replays what the ranks have recorded, on all their rows.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from isograd.checkpoint import CheckpointManager
from isograd.comm import threads
from isograd.core.contract import assemble
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine, LossScale, WeightAverage
from isograd.models import Transformer

from . import cases

LAYOUTS = {
    1: ("dp1",),
    2: ("dp2", "tp2", "tp2 sp", "cp2 ulysses", "cp2 ring", "pp2"),
    3: ("dp3", "cp3 ring"),
    4: ("dp4", "dp2 tp2", "dp2 tp2 sp", "dp2 cp2 ulysses", "dp2 cp2 ring", "cp2 ring tp2 sp", "cp4 ulysses2",
        "dp2 pp2", "pp2 tp2 sp", "cp2 ulysses pp2", "pp2 vpp2 dp2", "pp2 zb dp2"),
}  # fmt: skip
MODELS = ("llama", "qwen", "nine", "four", "deep", "deep-tied", "gpt2-ring")
CALLS = ("loop", "loop", "train", "train", "pending", "look", "evaluate", "discard", "rate", "edit", "save", "again",
         "moved", "nan", "two")  # fmt: skip
DECAY = 0.8  # of averages of weights


def fits(layout: str, model: str) -> bool:
    """Whether the model's heads and layers can be cut so."""
    sizes, config = Layout.parse(layout), cases.CONFIGS[model]
    kv = config.kv_heads or config.heads
    dealt = config.heads % sizes.tp == 0 and (kv % sizes.tp == 0 or sizes.tp % kv == 0)
    return dealt and config.heads // sizes.tp >= sizes.ulysses and (sizes.pp == 1 or config.layers >= 4)


@dataclass(frozen=True)
class Composition:
    """A run, as its seed draws it."""

    seed: int
    ranks: int
    layout: str
    model: str
    frozen: str  # a pattern of names
    options: dict[str, Any]
    optimizer: str
    averages: bool
    recompute: bool
    calls: tuple[str, ...]


def draw(seed: int) -> Composition:
    """The case of a seed."""
    r = random.Random(seed)
    ranks = r.choice((1, 2, 2, 2, 3, 4, 4))
    model = r.choice(MODELS)
    base = r.choice([layout for layout in LAYOUTS[ranks] if fits(layout, model)])
    zero, piped = r.randrange(4), "pp" in base
    options: dict[str, Any] = {"clip": r.choice((None, 0.5, 0.05)), "bucket_mb": r.choice((1e-4, 0.01, 16.0))}
    way = "" if piped else r.choice(("", "", "reproducible", "overlap", "sharded"))
    options |= {"reproducible": True} if way == "reproducible" else {"overlap": False} if way == "overlap" else {}
    options |= {"accumulate": "sharded"} if way == "sharded" else {}
    options |= {"keep_gathered": r.random() < 0.4, "scale": r.random() < 0.2}
    return Composition(
        seed, ranks, f"{base} zero{zero}", model, r.choice(("", "", "", "blocks.0.*", "*norm*", "embed*")), options,
        r.choice(("sgd", "adamw", "groups")), r.random() < 0.4, r.random() < 0.3,
        tuple(r.choices(CALLS, k=r.randrange(5, 9))),
    )  # fmt: skip


def optimizer_of(kind: str, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Of whole parameters, or of the rows that an Engine gives under the same names."""
    pairs = list(named)
    if kind == "sgd":
        return torch.optim.SGD([p for _, p in pairs], lr=0.05, momentum=0.9)
    if kind == "adamw":
        return torch.optim.AdamW([p for _, p in pairs], lr=0.01, weight_decay=0.1)
    norms = [p for n, p in pairs if fnmatchcase(n, "*norm*")]
    groups = [{"params": [p for n, p in pairs if not fnmatchcase(n, "*norm*")]}]
    groups += [{"params": norms, "lr": 0.005, "weight_decay": 0.0}] if norms else []
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2)


def freeze(model: nn.Module, pattern: str) -> None:
    """Parameters whose names match get no gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not fnmatchcase(name, pattern or "-"))


@dataclass
class Event:
    """What a rank has done, and what it saw."""

    kind: str
    step: int = 0
    micros: int = 0  # of each data rank
    data: int = 1  # data ranks
    numbers: tuple[float, ...] = ()  # loss, weight, norm
    tensors: dict[str, Tensor] = field(default_factory=dict)  # whole, by name


class Rank:
    """One rank's run."""

    def __init__(self, case: Composition, folder: str) -> None:
        self.case, self.folder, self.random = case, folder, random.Random(-1 - case.seed)
        self.steps, self.saves, self.events = 0, 0, list[Event]()
        self.averaged = list[tuple[Any, ...]]()  # at the end: rows of averages, and where they lie
        self.build(case.layout)

    def build(self, layout: str) -> None:
        """A model, whose first values are those of its seed, and its Engine."""
        self.mesh = Mesh(layout)
        self.model = Transformer(cases.CONFIGS[self.case.model], self.mesh, dtype=torch.float64)
        self.model.recompute = self.case.recompute
        freeze(self.model, self.case.frozen)
        self.make_engine()

    def make_engine(self) -> None:
        options, zero = dict(self.case.options), self.mesh.layout.zero
        options["keep_gathered"] &= zero == 3
        scale = LossScale(8.0) if options.pop("scale") else None
        if self.mesh.size("pp") > 1:
            options = {name: value for name, value in options.items() if name not in ("reproducible", "accumulate")}
        factory = lambda shards: optimizer_of(self.case.optimizer, shards.named())  # noqa: E731
        self.engine = Engine(self.model, self.mesh, factory, loss_scale=scale, **options)
        self.average = WeightAverage(self.engine, DECAY) if self.case.averages else None

    def run(self) -> Rank:
        for call in self.case.calls:
            getattr(self, call)()
        if self.average is not None:
            rows, zero, slots = self.average.rows, self.mesh.layout.zero, self.engine.plan.slots
            self.note("average")
            self.averaged = [(slot, slot.contract.local(self.mesh), zero, rows[slot.name]) for slot in slots]
        return self

    def note(self, kind: str, **seen: Any) -> None:
        self.events.append(Event(kind, **seen))

    def micros(self, count: int) -> list[dict[str, Any]]:
        first, of = self.mesh.index("dp") * count, self.mesh.size("dp") * count
        found = []
        for index in range(first, first + count):
            tokens, labels, samples = cases.micro_batch(cases.CONFIGS[self.case.model], self.steps, index, of)
            found.append({"tokens": tokens, "labels": labels, "samples": samples, "key": cases.dropout_key(self.steps)})
        return found

    def backward(self, count: int) -> None:
        micros = self.micros(count)
        if self.mesh.size("pp") > 1:
            self.engine.accumulate(micros)
            return
        reduces = [self.random.random() < 0.5 for _ in micros[1:]]
        for micro, synced in zip(micros, [*reduces, True], strict=True):
            loss, weight = self.model(**micro)
            with nullcontext() if synced else self.engine.no_sync():
                self.engine.backward(loss, weight=weight)

    def parameters(self) -> dict[str, Tensor]:
        with torch.no_grad(), self.engine.full_parameters():
            return {row.name: assemble(row.parameter, row.contract, self.mesh).clone() for row in self.engine.table}

    def ended(
        self, stats: Any, count: int, parameters: dict[str, Tensor] | None = None, step: int | None = None
    ) -> None:
        assert not stats.skipped
        self.note(
            "step", step=self.steps if step is None else step, micros=count, data=self.mesh.size("dp"),
            numbers=(stats.loss, stats.weight, stats.grad_norm), tensors=parameters or self.parameters(),
        )  # fmt: skip
        self.steps += step is None

    def loop(self) -> None:
        count = self.random.choice((1, 2, 3))
        self.backward(count)
        self.ended(self.engine.step(), count)

    def train(self) -> None:
        count = self.random.choice((1, 2, 4))
        self.ended(self.engine.train_step(self.micros(count)), count)

    def pending(self) -> None:
        count = self.random.choice((1, 2))
        self.backward(count)
        self.ended(self.engine.step_async().wait(), count)

    def two(self) -> None:
        """Two steps whose numbers are read behind both, the second one's first."""
        steps = []
        for _ in range(2):
            self.backward(count := self.random.choice((1, 2)))
            steps.append((self.engine.step_async(), count, self.parameters(), self.steps))
            self.steps += 1
        read = [pending.wait() for pending, *_ in reversed(steps)][::-1]
        for stats, (_, count, parameters, step) in zip(read, steps, strict=True):
            self.ended(stats, count, parameters, step)

    def look(self) -> None:
        count = self.random.choice((1, 2))
        self.backward(count)
        gradients = {name: gradient.clone() for name, gradient in self.engine.grads().items()}
        self.note("look", step=self.steps, micros=count, data=self.mesh.size("dp"), tensors=gradients)
        self.ended(self.engine.step(), count)

    def evaluate(self) -> None:
        found = self.engine.evaluate(self.micros(2))
        numbers = found.loss, found.weight
        self.note("evaluate", step=self.steps, micros=2, data=self.mesh.size("dp"), numbers=numbers)

    def discard(self) -> None:
        self.backward(self.random.choice((1, 2)))
        self.engine.discard()

    def nan(self) -> None:
        """A step that all ranks skip: the last data rank's first loss is NaN."""
        if self.mesh.size("pp") > 1 or self.mesh.size("cp") > 1:  # there a rank may have no label, and may not be NaN
            return
        for number, micro in enumerate(self.micros(2)):
            loss, weight = self.model(**micro)
            broken = number == 0 and self.mesh.index("dp") == self.mesh.size("dp") - 1
            self.engine.backward(loss * torch.nan if broken else loss, weight=weight)
        assert self.engine.step().skipped
        self.note("same", tensors=self.parameters())

    def rate(self) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= 1.5
        self.note("rate")

    def edit(self) -> None:
        with torch.no_grad(), self.engine.full_parameters() as model:
            for parameter in model.parameters():
                parameter.mul_(1.01)
        self.note("edit")

    def save(self) -> None:
        self.saves += 1
        with CheckpointManager(self.folder, self.engine) as keeper:
            keeper.save(self.saves)

    def again(self) -> None:
        """A new Engine of the same model: a fresh optimizer."""
        self.make_engine()
        self.note("again")

    def moved(self) -> None:
        """On under another layout, from a checkpoint."""
        self.save()
        base = self.random.choice([one for one in LAYOUTS[self.case.ranks] if fits(one, self.case.model)])
        self.build(f"{base} zero{self.random.randrange(4)}")
        with CheckpointManager(self.folder, self.engine) as keeper:
            assert keeper.load("auto") is not None
        self.note("same", tensors=self.parameters())


class OneDevice:
    """Plain torch, which does again what the ranks have recorded."""

    def __init__(self, case: Composition) -> None:
        self.case = case
        self.model = Transformer(cases.CONFIGS[case.model], Mesh.unbound("1"), dtype=torch.float64)
        freeze(self.model, case.frozen)
        self.begin()

    def begin(self) -> None:
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = optimizer_of(self.case.optimizer, self.trained.items())
        self.average = {name: p.detach().clone() for name, p in self.trained.items()}

    def gradients(self, event: Event) -> tuple[float, float]:
        """Of all rows of a step; the loss, and how many tokens it is the mean of."""
        self.optimizer.zero_grad()
        of, config = event.micros * event.data, cases.CONFIGS[self.case.model]
        batches = [cases.micro_batch(config, event.step, index, of) for index in range(of)]
        tokens_of_step, total = sum(int((labels != -100).sum()) for _, labels, _ in batches), 0.0
        for tokens, labels, samples in batches:
            loss, weight = self.model(tokens, labels, key=cases.dropout_key(event.step), samples=samples)
            if weight:
                (loss * weight / tokens_of_step).backward()
                total += float(loss.detach()) * float(weight)
        return total / tokens_of_step, float(tokens_of_step)

    def does(self, event: Event) -> tuple[tuple[float, ...], dict[str, Tensor]]:
        """The same: its numbers, and the tensors by name that the ranks must have seen."""
        if event.kind == "rate":
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.5
        elif event.kind == "edit":
            with torch.no_grad():
                torch._foreach_mul_(list(self.model.parameters()), 1.01)
        elif event.kind == "again":
            self.begin()
        numbers: tuple[float, ...] = self.gradients(event) if event.micros else ()
        if event.kind == "look":
            return (), {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        if event.kind == "step":
            norm = torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.case.options["clip"] or 1e30)
            self.optimizer.step()
            numbers = (*numbers, float(norm))
            for name, parameter in self.trained.items():
                self.average[name].lerp_(parameter.detach(), 1 - DECAY)
        whole = {name: p.detach() for name, p in self.model.named_parameters()}
        return numbers, whole if event.kind in ("step", "same") else {}

    def wrong(self, number: int, ranks: list[Rank]) -> list[str]:
        """What the ranks' event of this number has that one device has not."""
        events = [rank.events[number] for rank in ranks]
        if events[0].kind == "average":
            return self.wrong_averages(ranks)
        numbers, expected = self.does(events[0])
        found = []
        for one in events:
            near = [abs(a - b) <= 1e-9 * abs(b) for a, b in zip(one.numbers, numbers, strict=True)]
            found += [] if all(near) else [f"{one.numbers} for {numbers}"]
        lost = expected.keys() - {name for one in events for name in one.tensors}
        found += [f"nobody has {sorted(lost)}"] if lost else []
        for rank, one in enumerate(events):
            found += [f"rank {rank}: {n}" for n, value in one.tensors.items() if apart(value, expected[n], expected)]
        return found

    def wrong_averages(self, ranks: list[Rank]) -> list[str]:
        """Of each rank, the rows that it steps."""
        found = []
        for rank, one in enumerate(ranks):
            for slot, box, zero, rows in one.averaged:
                part = self.average[slot.name][tuple(slice(*ends) for ends in box)]
                part = slot.rows(part) if zero else part
                if apart(rows.reshape(-1), part.reshape(-1), self.average):
                    found.append(f"rank {rank}: the average of {slot.name}")
        return found


def apart(found: Tensor, expected: Tensor, all_of: dict[str, Tensor]) -> bool:
    """Beyond 1e-9 of its norm; of a key's bias, whose true gradient is zero, 1e-9 of what all have on average."""
    whole = max(float(tensor.norm()) for tensor in all_of.values())
    return found.shape != expected.shape or not float((found - expected).norm()) <= 1e-9 * max(
        float(expected.norm()), whole / 100
    )


def wrong(seed: int) -> list[str]:
    """Everything in which a run is not one device's."""
    case = draw(seed)
    with tempfile.TemporaryDirectory() as folder:
        ranks = threads.run(lambda: Rank(case, folder).run(), case.ranks, timeout=200)
    truth = OneDevice(case)
    for number, event in enumerate(ranks[0].events):
        if found := truth.wrong(number, ranks):
            return [f"{case}", f"event {number}, {event.kind}, step {event.step}:", *found]
    return []


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    bad = [found for seed in range(first, first + count) if (found := wrong(seed))]
    print(*(line for found in bad for line in found), f"{count} runs from {first}: {len(bad)} wrong", sep="\n")
