"""A step of several terms: what was announced, what came, and each term's share of the step.

The gradient of such a step is the sum over its terms t of

    coefficient_t * (sum over ranks and backwards of weight * gradient of the value) / W_t,

where W_t is the sum of all weights of t. The gradients of all terms are added up in one place, so no division at the
end of the step is right for each of them. W_t must therefore be known before the first backward:

1. `Engine.begin`: every rank says the weights that its backwards will bring (`agreed`). This is one gather, the same
   collective as the gather of a step (engine/step_status.py): ranks that discard or step instead are met there.
2. A backward seeds term t with coefficient * weight * W / W_t (`seeds`), and the step divides once by W, as every step
   does. W is the W_t of the first term that has any weight. A plain (loss, weight) is the case of one term: its seed is
   its weight, for which W need not be known before the step.
3. At the step, what came must be what was announced, on every rank (`refuse_incomplete`).

Under pp all ranks of a pipeline announce the same, since they hold the same micro-batches, and what their stages bring
is added up: a term belongs to the stage that returns it.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.core.loss_terms import Term, Terms
from isograd.core.mesh import DATA, Mesh
from isograd.engine import validation
from isograd.engine.tree import tree_sum
from isograd.errors import EngineError, did_you_mean

ROUNDING = 1e-9  # by which sums of weights that are no whole numbers may differ


@dataclass(frozen=True)
class Mean:
    """One term of a step or of an evaluation; equal on all ranks."""

    mean: float  # over the things of all ranks and micro-batches; NaN over none
    weight: float  # their number
    part: float  # of the loss: coefficient * mean; 0 over none


class TermWeights:
    """The terms of one step: made anew when the step before ends, and once more when all ranks agree on its weights.
    `names`: those of the latest step that had terms, equal on all ranks."""

    def __init__(
        self, mesh: Mesh, names: tuple[str, ...] = (), expected: Tensor | None = None, *, single_backward: bool = False
    ) -> None:
        """expected: [ranks of the world, terms], as announced; None: nothing is. single_backward: one backward
        announced its own weights, and the step takes no other."""
        self.mesh, self.names, self.expected, self.single_backward = mesh, names, expected, single_backward
        columns = () if expected is None else expected[list(mesh.ranks(DATA))].T
        self.weights = {n: float(tree_sum(list(column))) for n, column in zip(names, columns, strict=False)}  # W_t
        # By kind and name: weights that came, values times them, the same times the coefficient.
        self._sums: defaultdict[tuple[int, str], list[Tensor]] = defaultdict(list)

    def next_step(self) -> TermWeights:
        """Those of a step of which nothing is announced yet."""
        return TermWeights(self.mesh, self.names)

    @cached_property
    def _stages(self) -> Tensor:
        """[ranks of the world, the ranks of its pipeline]; pp is outermost."""
        columns = torch.arange(self.mesh.layout.world_size).view(self.mesh.layout.pp, -1).T
        return columns.repeat(self.mesh.layout.pp, 1)

    @property
    def weight(self) -> float:
        """W, which the step divides by; 0: no term has any weight."""
        return next((weight for weight in self.weights.values() if weight > 0), 0.0)

    def problem(self, weights: Mapping[str, Tensor | float]) -> EngineError | None:
        """What this rank alone can see is wrong with what it announces."""
        wrong = [(name, weight) for name, weight in weights.items() if not validation.is_weight(weight, waits=True)]
        return validation.bad_weight(f"the term {wrong[0][0]!r}", wrong[0][1], self.mesh) if wrong else None

    def message(self, weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
        """What `begin` sends in the place of the loss, and in that of `columns`."""
        known = [weights.get(name, 0.0) for name in self.names]
        return _print_of(weights), torch.tensor(known + [0.0] * 2 * len(known), dtype=torch.float64)

    def agreed(
        self, prints: Tensor, columns: Tensor, mine: Mapping[str, float], *, exact: bool, single: bool
    ) -> TermWeights:
        """Those of the step that begins. prints, columns: of `message`, a row per rank. All ranks raise alike.

        Names that are not those of the step before cross the wire once, as text. A rank may announce nothing at all.
        exact: this rank named all terms of the step, not only those that its micro-batches happened to have.
        single: the step takes one backward of terms, whose weights these are.
        """
        if bool(((prints == 0) | (prints == _print_of(self.names))).all()):
            names, expected = self.names, columns[:, : len(self.names)]
        else:
            notes = all_gather_object([exact, dict(mine)], self.mesh)
            self._refuse_unlike({rank: said for rank, (whole, said) in enumerate(notes) if whole and said})
            names = tuple(dict.fromkeys(name for _, said in notes for name in said))
            expected = torch.tensor([[said.get(n, 0.0) for n in names] for _, said in notes], dtype=torch.float64)
        self._refuse_unequal(names, expected)
        return TermWeights(self.mesh, names, expected, single_backward=single)

    def check(self, terms: Terms) -> None:
        """Refuse terms whose gradient would be wrong, before their backward begins."""
        for name, term in terms.items():
            if self.expected is not None and name not in self.names:
                known, hint = ", ".join(self.names) or "none", did_you_mean(name, self.names)
                seen, where = f"terms {', '.join(terms)}", self.mesh.describe_rank()
                raise EngineError("IG562", seen=seen, where=where, name=name, hint=hint, known=known)
            trains = bool(term.coefficient) and not validation.is_known_zero(term.weight)
            validation.check_mean(f"the term {name!r}", term.value, term.weight, self.mesh, trains=trains)
        if len([1 for term in terms.values() if _has_gradient(term)]) > 1:
            self.refuse_half(terms)

    def refuse_half(self, terms: Terms) -> None:
        """A root of its own is seeded with a power of two (engine/step.py); the roots of one run of autograd have no
        common one."""
        for name, term in terms.items():
            if _has_gradient(term) and term.value.dtype in (torch.float16, torch.bfloat16):
                seen, where = str(term.value.dtype), self.mesh.describe_rank()
                raise EngineError("IG567", seen=seen, where=where, value=f"the value of the term {name!r}")

    def seeds(self, terms: Terms) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        """(roots, their seeds in float64, roots that are left out, the weighted loss) of one backward."""
        if self.expected is None:
            raise EngineError("IG564", seen="the step was not begun", where=self.mesh.describe_rank())
        self.check(terms)
        roots, seeds, left_out, losses = [], [], [], [torch.zeros((), dtype=torch.float64, device=self.mesh.device)]
        for name, (value, weight, coefficient) in terms.items():
            count = number_on(value.device, weight)
            mean = weighted(value.detach().double().reshape(()), count)
            self._sums[0, name].append(count)
            self._sums[1, name].append(mean)
            share = coefficient * self._share(name)
            if coefficient:
                self._sums[2, name].append(mean * coefficient)
                losses.append(mean * share)
            if not _has_gradient(terms[name]):
                continue
            if validation.adds_nothing(value, weight, self.mesh):
                left_out.append(value)
            else:
                roots.append(value)
                seeds.append(count * share)
        return roots, seeds, left_out, torch.stack(losses).sum()

    def _share(self, name: str) -> float:
        weight = self.weights[name]
        return self.weight / weight if weight > 0 else 0.0

    def columns(self) -> Tensor:
        """What the other ranks must know at the step: the weights that came, weighted values, and parts of the loss."""
        device, zero = self.mesh.device, partial(torch.zeros, (), dtype=torch.float64)
        sums = [tree_sum(self._sums.get((kind, n)) or [zero()]).to(device) for kind in range(3) for n in self.names]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=device)

    def refuse_incomplete(self, columns: Tensor) -> None:
        """columns: a row per rank. All ranks raise alike."""
        if self.expected is None:
            return
        came = columns[:, : len(self.names)][self._stages].sum(1)
        apart = ~((came - self.expected).abs() <= ROUNDING * self.expected.abs().clamp(min=ROUNDING))
        if not bool(apart.any()):
            return
        ranks = apart.any(1).nonzero().flatten().tolist()
        told = [
            f"rank {rank}: "
            + ", ".join(
                f"{came[rank, i]:g} of {name!r}, {self.expected[rank, i]:g} announced"
                for i, name in enumerate(self.names)
                if apart[rank, i]
            )
            for rank in ranks
        ]
        seen = "; ".join(told[:4]) + (f"; and {len(told) - 4} more ranks" if len(told) > 4 else "")
        raise EngineError("IG563", seen=seen, where=self.mesh.describe_rank())

    def means(self, columns: Tensor) -> dict[str, Mean]:
        """columns: of the ranks whose things are different ones."""
        sums = columns.reshape(len(columns), 3, len(self.names))[:, 1:]
        return {
            name: mean_of(weight, *(float(tree_sum(list(sums[:, kind, i]))) for kind in (0, 1)))
            for i, (name, weight) in enumerate(self.weights.items())
        }

    def mixed(self) -> EngineError:
        """IG565."""
        both = f"terms {', '.join(self.names)}, and backward(loss, weight=...)"
        seen = both if self.expected is not None else "backward(loss, weight=...), and then terms"
        return EngineError("IG565", seen=seen, where=self.mesh.describe_rank())

    def _refuse_unlike(self, notes: Mapping[int, Mapping[str, float]]) -> None:
        by_names: dict[tuple[str, ...], list[int]] = {}
        for rank, note in notes.items():
            by_names.setdefault(tuple(sorted(note)), []).append(rank)
        if len(by_names) > 1:
            seen = "; ".join(f"ranks {ranks}: {', '.join(names)}" for names, ranks in by_names.items())
            raise EngineError("IG561", seen=seen, where=self.mesh.describe_rank())

    def _refuse_unequal(self, names: Sequence[str], expected: Tensor) -> None:
        layout = self.mesh.layout
        for axis in ("tp", "pp"):
            for peers in layout.groups(axis):
                rows = expected[list(peers)]
                if bool((rows != rows[0]).any()):
                    seen = f"{', '.join(names)}: {rows.tolist()} on ranks {list(peers)}"
                    raise EngineError("IG516", seen=seen, where=self.mesh.describe_rank(), axes=axis, things="weights")


def number_on(device: torch.device, number: Tensor | float) -> Tensor:
    """A weight or a loss in fp64 on this device. One of the host is written there: a copy would make the host wait."""
    if isinstance(number, Tensor) and number.device == device:
        return number.detach().double().reshape(())
    return torch.full((), float(number), dtype=torch.float64, device=device)


def on_host(weights: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Weights that lie on a card are read together."""
    there = {name: w for name, w in weights.items() if isinstance(w, Tensor) and w.is_cuda and w.numel() == 1}
    if not there:
        return dict(weights)
    read = raw.to_host(torch.stack([w.detach().double().reshape(()) for w in there.values()]))
    return {**weights, **dict(zip(there, read, strict=True))}


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """A mean over nothing is NaN in torch; its weight of zero says that it adds nothing."""
    return torch.where(weight == 0, torch.zeros_like(loss), loss * weight)


def mean_of(weight: float, value: float, part: float) -> Mean:
    """The mean of things whose values, and parts of the loss, add up to these numbers."""
    return Mean(value / weight, weight, part / weight) if weight > 0 else Mean(math.nan, weight, 0.0)


def _print_of(names: Iterable[str]) -> Tensor:
    """A number that stands for a set of names; 0 for none."""
    text = "\0".join(sorted(names))
    return torch.tensor(1.0 + zlib.crc32(text.encode()) if text else 0.0, dtype=torch.float64)


def _has_gradient(term: Term) -> bool:
    return term.value.requires_grad and term.coefficient != 0
