"""The Taylor test of a layout: each class of parameters is moved a little, and the loss must follow the gradient.

For models that have no one-device reference (too large, or made for one layout only). The loss is evaluated under the
layout itself, so an error that forward and backward share goes unseen: this proves that the gradient is the loss's,
not that the loss is one device's.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.core.layout import Layout
from isograd.core.mesh import DATA, Mesh
from isograd.launcher.launch import World
from isograd.prove.case import Case
from isograd.prove.prove import MakeCase, backwards, make, name_of, pieces_of
from isograd_verify import tolerances
from isograd_verify.compare.numerics import direction, scale_of, slope_along
from isograd_verify.tell.findings import BUG, Finding, Subject, kind
from isograd_verify.tell.report import Report


def taylor_test(case: MakeCase | str, layouts: str, timeout: float | None = 600.0) -> Report:
    """One directional derivative for each class of parameters, under each layout, in fp64."""
    report = Report(f"Taylor test of {name_of(case)}, float64")
    for text in layouts.split(";"):
        layout = Layout.parse(text)
        world = World(layout.world_size)
        try:
            measured = world.run(partial(_measure, case, str(layout)), timeout=timeout)[0]
        finally:
            world.close()
        subject = Subject(str(layout), layout.world_size, compared=True)
        largest = max(abs(promised) for _, promised in measured.values())
        for key, (slope, promised) in measured.items():
            error = abs(slope - promised) / max(abs(slope), abs(promised), tolerances.SLOPE_FLOOR * largest, 1e-300)
            subject.errors[key] = error if math.isfinite(error) else math.nan
            if not error <= tolerances.SLOPE:
                ratio = promised / slope if slope else math.inf
                said = f"{key}: along a random direction the loss changes by {slope:.6g}, "
                said += f"the gradient says {promised:.6g} ({ratio:.4g} times)"
                ratios = (("gradient / loss", ratio),)
                subject.findings.append(Finding(BUG, "", said, tensors=(key,), coefficients=ratios))
        report.subjects.append(subject)
    return report


def _measure(case: MakeCase | str, layout: str) -> dict[str, tuple[float, float]]:
    """Per class of parameters: (slope of the loss, what the gradient promises)."""
    from isograd.engine import Engine

    mesh = Mesh(layout)
    made = make(case, mesh, torch.float64)
    engine = Engine(made.model, mesh, made.optimizer)
    backwards(engine, made, pieces_of(made, mesh))
    gradients = {name: g.clone() for name, g in engine.grads().items()}
    parameters = {r.name: r.parameter for r in engine.table if r.parameter.requires_grad}
    measured = {}
    for key in dict.fromkeys(kind(name) for name in parameters):
        steps: dict[str, Tensor] = {}
        promised = 0.0
        for name, parameter in parameters.items():
            if kind(name) == key:
                whole = direction(name, gradients[name])
                mine = torch.tensor([scale_of(parameter)], dtype=torch.float64, device=mesh.device)
                size = float(raw.all_max(mine, mesh.group("world"))[0])  # shards have different sizes of elements
                promised += float((gradients[name].double() * whole).sum()) * size
                box = tuple(slice(*span) for span in engine.table[name].local(mesh))
                steps[name] = (whole[box] * size).to(parameter.dtype)
        slope = slope_along(partial(_loss, made, mesh), dict(parameters), steps, h=1e-3)
        measured[key] = (slope, promised)
    return measured


def _loss(case: Case, mesh: Mesh) -> float:
    """The step's loss: each term summed over all parts and data ranks, divided by its weight."""
    sums: dict[str, Tensor] = {}
    for part in pieces_of(case, mesh):
        for name, (mean, weight, coefficient) in case.terms(part).items():
            found = sums.setdefault(name, torch.zeros(2, dtype=torch.float64, device=mesh.device))
            if float(weight):
                value = coefficient * float(mean.detach().double()) * float(weight)
                found += torch.tensor([value, float(weight)], dtype=torch.float64, device=mesh.device)
    total = raw.all_reduce(torch.stack([sums[name] for name in sorted(sums)]), mesh.group(DATA))
    return float(sum(value / weight for value, weight in total.tolist() if weight))
