"""Recordings written by hand: what ranks hold, said in a few lines, so that a test can plant exactly one difference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from isograd_verify.record import events
from isograd_verify.record.events import Event
from isograd_verify.record.recording import VERSION, RankWriter, Recording, write_json
from isograd_verify.record.sketch import digest, project, sketch, squares, worthwhile
from isograd_verify.watch.given import described

RATE = 0.1
Box = list[list[int]]


@dataclass
class Held:
    """What one rank holds of one parameter in one step."""

    value: Tensor
    gradient: Tensor | None
    box: Box | None = None
    whole: tuple[int, ...] | None = None  # the global shape
    parts: dict[int, Tensor] = field(default_factory=dict)  # what each micro-batch added on this rank
    after: Tensor | None = None  # None: an SGD step
    owned: bool = True
    trainable: bool = True


@dataclass
class Step:
    """One optimizer step of one rank."""

    held: dict[str, Held]
    inputs: list[Tensor | dict[str, Tensor]] = field(default_factory=list)  # per micro-batch; 'x', or by name
    tensors: dict[str, Tensor] = field(default_factory=dict)  # more of the step's file
    events: list[Event] = field(default_factory=list)


def write(home: Path, ranks: list[list[Step]], layout: str = "", beyond: int | None = None) -> Recording:
    """A recording of these ranks' steps, as Capture would have left it. `beyond`: tensors of more elements by sketches
    alone."""
    for rank, steps in enumerate(ranks):
        writer = RankWriter(home, rank, len(ranks))
        for number, step in enumerate(steps, 1):
            _write_step(writer, number, step, beyond)
        writer.close()
    write_json(home / "recording.json", {"version": VERSION, "layout": layout})
    return Recording(home)


def _write_step(writer: RankWriter, number: int, step: Step, beyond: int | None) -> None:
    micros = {m for one in step.held.values() for m in one.parts} or {0}
    for micro, given in enumerate(step.inputs):
        named = given if isinstance(given, dict) else {"x": given}
        writer.event(events.Input(number, forward=micro))
        writer.event(events.ForwardInputs(number, forward=micro, tensors=described(named)))
    for micro in sorted(micros):
        writer.event(events.Backward(number, micro))
    for event in step.events:
        writer.event(replace(event, step=event.step or number))
    tensors, about = dict(step.tensors), {}
    for name, one in step.held.items():
        tensors[f"parameter/{name}"] = one.value
        after = one.after
        if after is None:
            after = one.value if one.gradient is None else one.value - RATE * one.gradient
        tensors[f"after/{name}"] = after
        for micro, part in one.parts.items():
            tensors[f"part/{micro}/{name}"] = sketch(part)
        if one.gradient is not None:
            tensors[f"final/{name}"] = one.gradient
            tensors[f"sum/{name}"] = tensors[f"clipped/{name}"] = sketch(one.gradient)
        if beyond is not None:
            _sketched(tensors, name, one, beyond)
        about[name] = told(one, after)
    writer.event(events.Step(number, parameters=about, backwards=number * len(micros)))
    # Two names for one tensor are two entries of the file.
    writer.tensors(number, {name: t.clone() for name, t in tensors.items()})


def _sketched(tensors: dict[str, Tensor], name: str, one: Held, beyond: int) -> None:
    """Takes large whole tensors out, and puts sums along their dimensions in."""
    starts = tuple(start for start, _ in one.box) if one.box is not None else ()
    for kind in ("parameter", "after", "final"):
        whole = tensors.get(f"{kind}/{name}")
        if whole is None or not worthwhile(tuple(whole.shape), whole.numel(), beyond):
            continue
        del tensors[f"{kind}/{name}"]
        for d, sums in project(whole, starts).along.items():
            tensors[f"along/{kind}/{d}/{name}"] = sums
    for micro, part in one.parts.items():
        for d, sums in project(part).along.items() if worthwhile(tuple(part.shape), part.numel(), beyond) else ():
            tensors[f"along/{micro}/{d}/{name}"] = torch.stack([sketch(row) for row in sums])


def told(one: Held, after: Tensor) -> events.Parameter:
    flat, gradient = one.value.reshape(-1), one.gradient
    return events.Parameter(
        shape=tuple(one.value.shape),
        whole=tuple(one.whole or one.value.shape),
        box=None if one.box is None else tuple((start, stop) for start, stop in one.box),
        declared=False,
        dtype=str(one.value.dtype).removeprefix("torch."),
        trainable=one.trainable,
        owned=one.owned,
        gradient=gradient is not None,
        gradient_hash=digest(gradient) if gradient is not None else "",
        squares=squares(gradient) if gradient is not None else None,
        gradient_dtype=str(gradient.dtype).removeprefix("torch.") if gradient is not None else "",
        finite=gradient is None or bool(gradient.isfinite().all()),
        hash=digest(after),
        part_shape=tuple(one.value.shape),
        before=digest(one.value),
        constant=bool((flat == flat[:1]).all()),
    )


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that depend on shape and seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
