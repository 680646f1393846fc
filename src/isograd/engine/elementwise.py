"""Which optimizers may step rows: those that step each element by itself.

From ZeRO 1 on a rank's optimizer sees its rows of each parameter, and under tp its part of a cut one. Adam computes for
an element what it would compute in the whole tensor. Adafactor, LAMB and LARS take a mean or norm of whatever tensor
they are given, and would silently train otherwise. Torch's own elementwise optimizers are listed; any other class is
tried out once, before training: whole tensors, their rows apart, and each tensor apart are stepped, and compared.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isograd.engine.joined import Joined
from isograd.engine.matrices import BY_MATRIX
from isograd.engine.plan import Slot
from isograd.errors import EngineError

KNOWN = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}
Reach = Literal["element", "tensor", "all tensors"]
# Large enough for statistics that small tensors are spared (factors, quantised blocks), and cut off their boundaries.
SHAPES: tuple[tuple[int, ...], ...] = ((2, 64), (129, 250), (5,))
CUTS = (1, 61, 2)
STEPS = 3
LR = 0.01  # instead of the user's, which may be zero while a schedule warms up
TOLERANCE = 1e-3  # of the largest change: rounding in fp32 is a hundred times less, a quantised state ten times more


def refuse(optimizer: torch.optim.Optimizer, slots: Mapping[int, Slot], *, by_rows: bool) -> None:
    """`slots`: of each tensor (by id) that may be stepped. `by_rows`: owners step their rows only."""
    for member in optimizer.optimizers if isinstance(optimizer, Joined) else (optimizer,):
        _refuse_closure(member)
        named = any(word in base.__name__.lower() for base in type(member).__mro__ for word in BY_MATRIX)
        if type(member) in KNOWN or named:  # matrices.refuse_pieces knows these by name
            continue
        for group in member.param_groups:
            stepped = [slots[id(p)] for p in group["params"] if id(p) in slots]
            cut = [s for s in stepped if s.contract.shards or (by_rows and s.cut_by_rows)]
            if cut or (by_rows and any(s.owners.size > 1 for s in stepped)):
                _refuse_group(member, group, stepped, cut)


def _refuse_closure(member: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(member).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise EngineError(
            "IG543",
            f"{type(member).__name__} evaluates the loss several times in a step, which the engine cannot",
            seen=f"{type(member).__name__}.step(closure)",
            expected="an optimizer whose step takes the gradients that are there",
            fix="use another optimizer; torch.optim.LBFGS needs a loop of its own, without an Engine",
        )


def _refuse_group(
    member: torch.optim.Optimizer, group: dict[str, Any], stepped: Sequence[Slot], cut: Sequence[Slot]
) -> None:
    kind = type(member).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            reach, seen = tried_out(member, group)
    except Exception as error:
        reach, seen = "tensor", f"trying it out failed: {type(error).__name__}: {error}"
    if reach == "element" or (reach == "tensor" and not cut):
        return
    slot = max(cut or stepped, key=lambda slot: slot.parameter.numel())
    over = f"over {slot.contract.beside}"
    how = over if slot.contract.shards else "by rows over the data ranks" if cut else "given whole to one rank"
    fix = "a layout without tp and ep at zero0, where each rank steps all parameters whole"
    if reach == "tensor":
        fix += f"; or, for matrices, Engine(..., whole=['blocks.*']) with Joined({kind}(ps.whole), AdamW(ps.rest))"
    raise EngineError(
        "IG542",
        f"{kind} is not known to step each element of a parameter by itself, and was given pieces",
        seen=f"{seen}; {slot.name!r} is {'cut ' if cut else ''}{how}",
        expected="an elementwise optimizer (AdamW, SGD, ...), or whole parameters",
        fix=fix,
    )


@torch.no_grad()
def tried_out(member: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[Reach, str]:
    """How far a gradient reaches in this group's step: its own element, its tensor, or all; and what showed it."""
    like = group["params"][0]
    draw = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        """Rows of different sizes, so that a norm of some of them is not that of all."""
        sizes = torch.logspace(-1, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        return (torch.randn(shape, generator=draw) * sizes).to(like.device, like.dtype)

    start = [random(shape) for shape in SHAPES]
    gradients = [[random(shape) for shape in SHAPES] for _ in range(STEPS)]

    def run(parts: Sequence[Sequence[tuple[int, slice]]]) -> list[Tensor]:
        """The tensors after stepping, where each entry of `parts` is one rank's: slices of tensors by number."""
        ends = [t.clone() for t in start]
        for mine in parts:
            tensors = [nn.Parameter(start[number][rows].clone()) for number, rows in mine]
            twin = _twin(member, group, tensors)
            for step in gradients:
                for tensor, (number, rows) in zip(tensors, mine, strict=True):
                    tensor.grad = step[number][rows].clone()
                type(member).step(twin)
            for tensor, (number, rows) in zip(tensors, mine, strict=True):
                ends[number][rows] = tensor
        return ends

    everything = slice(None)
    whole = run([[(n, everything) for n in range(len(start))]])
    if all(torch.equal(a, b) for a, b in zip(whole, start, strict=True)):
        return "tensor", "trying it out moved no parameter"
    rows_apart = run(
        [[(n, slice(cut)) for n, cut in enumerate(CUTS)], [(n, slice(cut, None)) for n, cut in enumerate(CUTS)]]
    )
    off = _difference(rows_apart, whole, start)
    if off <= TOLERANCE:
        return "element", ""
    tensors_apart = run([[(n, everything)] for n in range(len(start))])
    reach: Reach = "tensor" if _difference(tensors_apart, whole, start) <= TOLERANCE else "all tensors"
    unit = "a tensor" if reach == "tensor" else "one parameter"
    return reach, f"rows stepped apart change otherwise than in whole tensors, by {off:.1%} of the step: it mixes " + (
        f"the elements of {unit}" if reach == "tensor" else "parameters"
    )


def _twin(member: torch.optim.Optimizer, group: Mapping[str, Any], tensors: list[nn.Parameter]) -> Any:
    """The optimizer again, with its options, for other tensors and without what users have hooked to it."""
    options = {k: v.copy() if isinstance(v, dict | list | set) else v for k, v in vars(member).items() if k != "step"}
    hooks = {k: OrderedDict[int, Any]() for k in options if k.startswith("_optimizer_") and k.endswith("_hooks")}
    lr = group.get("lr")
    rate = torch.full_like(lr, LR) if isinstance(lr, Tensor) else LR if isinstance(lr, float) else lr
    groups = [{**group, "params": tensors, **({"lr": rate} if "lr" in group else {})}]
    twin = object.__new__(type(member))
    vars(twin).update(options | hooks | {"param_groups": groups, "state": defaultdict(dict)})
    return twin


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """The largest, relative to how far the tensor has moved."""
    return max(
        float((a - b).abs().max() / (b - s).abs().max().clamp(min=torch.finfo(s.dtype).tiny))
        for a, b, s in zip(found, expected, start, strict=True)
    )
