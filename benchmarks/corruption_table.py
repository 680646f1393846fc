"""One bit flips on rank 1, at one place of a step: which check finds it, under each layout.

    python -m benchmarks.corruption_table --layouts "dp2 zero1" "pp2" tp2

All checks are on in every step: `copies` (IG984), `state` (IG583), `sums` (IG580), and `replay` (IG581) where a layout
allows it. Messages are hit by kind: the axes of the group and its purpose. Each place is hit once for each bit: of the
mantissa's low and high end, and of the exponent. A cell has the code that was raised in the step of the hit, or in the
next one ("later"), and how often; "silent" is a step that was taken, with other weights than without the hit.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

import isograd as ig
from isograd.comm import world as here
from isograd.comm.group import Group
from isograd.comm.transport import Transport
from isograd.engine import MemoryChecksum, ReplayCheck
from isograd.engine.batches import micro_batches
from isograd.engine.sdc import memory
from isograd.engine.zero3.gather_check import NOTE
from isograd.errors import IsogradError
from isograd.launcher.launch import World
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions
from isograd.train.run.peers import equal_copies

LAYOUTS = ("dp2 zero1", "dp2 zero3", "tp2", "tp2 sp", "cp2", "pp2", "dp2 ep2")
BITS = (2, 20, 26)
MICROS = 2
AT_REST = ("weight", "optimizer state")
OWN = ("gradient", "activation", "batch")


def flip(tensor: Tensor, bit: int) -> None:
    """Of its largest number: a low bit of a zero changes nothing."""
    words = tensor.detach().view(torch.int32).view(-1)
    words[int(tensor.abs().argmax())] ^= 1 << bit


def kind(group: Group, tensor: Tensor) -> str:
    """How a message of numbers is called; empty: it is none."""
    if tensor.dtype != torch.float32 or tensor.numel() < 16:
        return ""
    return f"message {group.axes}" + (f" ({group.purpose})" if group.purpose else "")


@contextmanager
def messages(change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """What leaves this rank passes through `change`."""
    send, held = Transport.send, list[Tensor]()
    groups = {id(group.transport): group for group in here.process.groups}  # by their transport

    def sent(self: Transport, handle: Any, tensors: Any, peer: int, tag: int, control: bool) -> Any:
        tensors = [change(kind(groups[id(self)], t), t) for t in tensors] if id(self) in groups else tensors
        held.extend(tensors)  # until the receiver has them
        return send(self, handle, tensors, peer, tag, control)

    Transport.send = sent  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transport.send = send  # type: ignore[method-assign]


class Course:
    """Two steps of a model under all checks, of which the second has the hit, and a third."""

    def __init__(self, layout: str) -> None:
        self.mesh = ig.Mesh(layout)
        experts = {"experts": ExpertOptions(number=4, per_token=2, width=48)} if "ep" in layout else {}
        config = TransformerConfig(vocab=211, hidden=64, layers=2, heads=4, mlp=96, tied=False, **experts)
        self.model = Transformer(config, self.mesh)
        self.engine = ig.Engine(self.model, self.mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-3))
        self.seal, self.replay = MemoryChecksum(self.engine), None
        with suppress(IsogradError):
            self.replay = ReplayCheck(self.engine)
        self.step(0)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(100 * number + self.mesh.index("dp"))
        tokens = torch.randint(211, (4, 32), generator=chance)
        return tokens, tokens.roll(-1, 1)

    def step(self, number: int, batch: tuple[Tensor, Tensor] | None = None) -> None:
        batch = batch or self.batch(number)
        self.engine.check_sums()
        if self.replay is not None:
            self.replay.begin()
        self.engine.accumulate(batch, MICROS)
        if number:
            self.seal.check()
        if self.replay is not None:
            self.replay.compare(micro_batches(batch, MICROS)[0])
        equal_copies(self.engine, number)
        if self.engine.step().skipped:
            raise IsogradError("skipped", "not finite")
        self.seal = MemoryChecksum(self.engine)

    def hit(self, what: str, bit: int) -> None:
        """The second step, with the hit on rank 1."""
        batch, mine = self.batch(1), self.mesh.rank == 1
        rest = memory.tensors(self.engine)
        if mine and what == "weight":
            flip(max((t for k, t in rest.items() if not k.startswith("optimizer/")), key=Tensor.numel), bit)
        elif mine and what == "optimizer state":
            flip(max((t for k, t in rest.items() if k.startswith("optimizer/exp_avg")), key=Tensor.numel), bit)
        elif mine and what == "batch":
            tokens = batch[0].clone()
            tokens[1, 7] = (tokens[1, 7] + 1) % 211
            batch = tokens, batch[1]
        done = [not mine]

        def once(tensor: Tensor) -> Tensor:
            if done[0] or tensor is None:
                return tensor
            done[0], changed = True, tensor.detach().clone()
            flip(changed if changed.dtype == torch.float32 else changed[NOTE:].view(torch.float32), bit)
            return tensor + (changed - tensor).detach() if tensor.requires_grad else changed

        def made(_: Any, __: Any, out: Any) -> Any:
            whole = (out,) if isinstance(out, Tensor) else out  # a layer of experts returns what it has counted, too
            if what == "activation":
                whole = (once(whole[0]), *whole[1:])
            else:
                whole[0].register_hook(once)
            return whole[0] if isinstance(out, Tensor) else whole

        hooked = [m for name, m in self.model.named_modules() if name.split(".")[-1] in ("mlp", "attention")]
        handles = [m.register_forward_hook(made) for m in hooked if what in ("gradient", "activation")]
        with messages(lambda said, tensor: once(tensor) if said == what else tensor):
            self.step(1, batch)
        for handle in handles:
            handle.remove()

    def weights(self) -> list[Tensor]:
        return [tensor.clone() for tensor in memory.tensors(self.engine).values()]


def kinds(layout: str) -> list[str]:
    """The kinds of messages of numbers that leave rank 1 in a step."""
    found, course = list[str](), Course(layout)

    def note(said: str, tensor: Tensor) -> Tensor:
        if said and said not in found:
            found.append(said)
        return tensor

    with messages(note):
        course.engine.accumulate(course.batch(1), MICROS)
        course.engine.step()
    return found


def truth(layout: str) -> list[Tensor]:
    course = Course(layout)
    course.step(1)
    return course.weights()


def outcome(layout: str, what: str, bit: int) -> tuple[str, list[Tensor]]:
    """What this rank hears of a hit, and its weights after it."""
    course = Course(layout)
    after = list[Tensor]()
    try:
        course.hit(what, bit)
        after = course.weights()
    except IsogradError as error:
        return error.code, after
    try:
        course.step(2)
    except IsogradError as error:
        return f"{error.code} later", after
    return "silent", after


def cell(world: World, layout: str, what: str, expected: list[list[Tensor]]) -> str:
    """What was found of a place, over all bits."""
    found = Counter[str]()
    for bit in BITS:
        said = world.run(outcome, layout, what, bit, timeout=120)
        words = sorted({code for code, _ in said if code != "silent"}) or ["silent"]
        alike = all(
            len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            for (_, ours), theirs in zip(said, expected, strict=True)
        )
        found["no effect" if words == ["silent"] and alike else " and ".join(words)] += 1
    return ", ".join(f"{word} {count} of {len(BITS)}" for word, count in found.items())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    options = parser.parse_args()
    print("| layout | hit on rank 1 | found |\n|---|---|---|", flush=True)
    for layout in options.layouts:
        size = ig.Layout.parse(layout).world_size
        with World(size) as world:
            sent = world.run(kinds, layout, timeout=120)[1]
            expected = world.run(truth, layout, timeout=120)
            for what in (*AT_REST, *OWN, *sent):
                print(f"| `{layout}` | {what} | {cell(world, layout, what, expected)} |", flush=True)


if __name__ == "__main__":
    main()
