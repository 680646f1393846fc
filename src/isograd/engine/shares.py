"""A step of several terms: what was announced, what came, and each term's share of the step.

The gradient of such a step is the sum over its terms t of

    coefficient_t * (sum over ranks and backwards of weight * gradient of the value) / W_t,

where W_t is the sum of all weights of t. The gradients of all terms are added up in one place, so no division at the
end of the step is right for each of them. W_t must therefore be known before the first backward:

1. `Engine.begin`: every rank says the weights that its backwards will bring (`agree`). This is one gather, the same
   collective as the gather of a step (engine/totals.py): ranks that discard or step instead are met there, not waited
   for.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from isograd.comm.notes import gather_notes
from isograd.engine.tree import total
from isograd.errors import EngineError, did_you_mean
from isograd.mesh import DATA, Mesh
from isograd.terms import Term, Terms

ROUNDING = 1e-9  # by which sums of weights that are no whole numbers may differ


@dataclass(frozen=True)
class Mean:
    """One term of a step or of an evaluation; equal on all ranks."""

    mean: float  # over the things of all ranks and micro-batches; NaN over none
    weight: float  # their number
    part: float  # of the loss: coefficient * mean; 0 over none


class Shares:
    """The terms of the running step. `names`: those of the latest step that had terms, equal on all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.names: tuple[str, ...] = ()
        columns = torch.arange(mesh.layout.world_size).view(mesh.layout.pp, -1).T  # pp is outermost
        self._stages = columns.repeat(mesh.layout.pp, 1)  # [ranks of the world, the ranks of its pipeline]
        self.clear()

    def clear(self) -> None:
        """A new step: nothing is announced."""
        self.announced: Tensor | None = None  # [ranks of the world, terms]
        self.weights: dict[str, float] = {}  # W_t
        self.alone = False  # one backward announced its own weights: the step takes no other
        self._came: dict[str, list[Tensor]] = {}
        self._values: dict[str, list[Tensor]] = {}  # weighted
        self._parts: dict[str, list[Tensor]] = {}  # the same times the coefficient

    @property
    def weight(self) -> float:
        """W, which the step divides by; 0: no term has any weight."""
        return next((weight for weight in self.weights.values() if weight > 0), 0.0)

    # -- 1. before the first backward

    def problem(self, weights: Mapping[str, Tensor | float]) -> EngineError | None:
        """What this rank alone can see is wrong with what it announces."""
        wrong = [(name, weight) for name, weight in weights.items() if not _is_weight(weight, waits=True)]
        return self.bad_weight(*wrong[0]) if wrong else None

    def message(self, weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
        """What `begin` sends in the place of the loss, and in that of `columns`."""
        known = [weights.get(name, 0.0) for name in self.names]
        return _print_of(weights), torch.tensor(known + [0.0] * 2 * len(known), dtype=torch.float64)

    def agree(self, prints: Tensor, columns: Tensor, mine: Mapping[str, float], exact: bool) -> None:
        """The names, and every rank's weights. prints, columns: of `message`, a row per rank. All ranks raise alike.

        Names that are not those of the step before cross the wire once, as text. A rank may announce nothing at all.
        exact: this rank named all terms of the step, not only those that its micro-batches happened to have.
        """
        if bool(((prints == 0) | (prints == _print_of(self.names))).all()):
            announced = columns[:, : len(self.names)]
        else:
            notes = gather_notes([exact, dict(mine)], self.mesh.group("world"), self.mesh.device)
            self._refuse_unlike({rank: said for rank, (whole, said) in enumerate(notes) if whole and said})
            names = tuple(dict.fromkeys(name for _, said in notes for name in said))
            announced = torch.tensor([[said.get(n, 0.0) for n in names] for _, said in notes], dtype=torch.float64)
            self.names = names
        self._refuse_unequal(announced)
        self.announced = announced
        data = announced[list(self.mesh.ranks(DATA))]
        self.weights = {name: float(total(list(data[:, i]))) for i, name in enumerate(self.names)}

    # -- 2. a backward

    def check(self, terms: Terms) -> None:
        """Refuse terms whose gradient would be wrong, before their backward begins."""
        for name, term in terms.items():
            if self.announced is not None and name not in self.names:
                raise EngineError(
                    "IG562",
                    f"the term {name!r} was not announced for this step{did_you_mean(name, self.names)}",
                    seen=f"terms {', '.join(terms)}",
                    expected=f"of those announced: {', '.join(self.names) or 'none'}",
                    fix=f"engine.begin(..., {name}=...) with this rank's weight of it over the whole step, "
                    "on every rank",
                    where=self.mesh.where(),
                )
            self._check(name, term)
        if len([1 for term in terms.values() if _has_gradient(term)]) > 1:
            self.refuse_half(terms)

    def refuse_half(self, terms: Terms) -> None:
        """A root of its own is seeded with a power of two (engine/ledger.py); the roots of one run of autograd have no
        common one."""
        for name, term in terms.items():
            if _has_gradient(term) and term.value.dtype in (torch.float16, torch.bfloat16):
                raise EngineError(
                    "IG567",
                    f"the value of the term {name!r} is in half precision",
                    seen=str(term.value.dtype),
                    expected="float32 or float64: the share of a term in the step has more digits than half precision",
                    fix="compute the loss in float32, for example from logits.float()",
                    where=self.mesh.where(),
                )

    def _check(self, name: str, term: Term) -> None:
        value = term.value
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise EngineError(
                "IG514",
                f"the value of the term {name!r} is not one number",
                seen=f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__,
                expected="a scalar tensor: the mean over this rank's things, with their number as its weight",
                where=self.mesh.where(),
            )
        if not _is_weight(term.weight):
            raise self.bad_weight(name, term.weight)
        if not value.requires_grad and term.coefficient and not _is_zero(term.weight):
            raise EngineError(
                "IG513",
                f"the term {name!r} does not need a gradient",
                seen="requires_grad is False: detached, computed under no_grad, or independent of every parameter",
                expected="a value computed by the model with gradients enabled; or a weight of 0, where there is none",
                fix="a term that is only to be shown has the coefficient 0",
                where=self.mesh.where(),
            )

    def seeds(self, terms: Terms) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        """(roots, their seeds in float64, roots that are left out, the weighted loss) of one backward."""
        if self.announced is None:
            raise self.not_announced("the step was not begun")
        self.check(terms)
        roots, seeds, left_out, losses = [], [], [], [torch.zeros((), dtype=torch.float64, device=self.mesh.device)]
        for name, (value, weight, coefficient) in terms.items():
            count = torch.as_tensor(weight, dtype=torch.float64, device=value.device).detach().reshape(())
            mean = weighted(value.detach().double().reshape(()), count)
            self._came.setdefault(name, []).append(count)
            self._values.setdefault(name, []).append(mean)
            share = coefficient * self._share(name)
            if coefficient:
                self._parts.setdefault(name, []).append(mean * coefficient)
                losses.append(mean * share)
            if _has_gradient(terms[name]) and self._left_out(terms[name]):
                left_out.append(value)
            elif _has_gradient(terms[name]):
                roots.append(value)
                seeds.append(count * share)
        return roots, seeds, left_out, torch.stack(losses).sum()

    def _left_out(self, term: Term) -> bool:
        """A mean over nothing is NaN in torch, and so is its gradient, whatever it is multiplied with."""
        return _is_zero(term.weight) and not bool(term.value.isfinite())

    def _share(self, name: str) -> float:
        weight = self.weights[name]
        return self.weight / weight if weight > 0 else 0.0

    # -- 3. the step

    def columns(self) -> Tensor:
        """What the other ranks must know at the step: the weights that came, weighted values, and parts of the loss."""
        device, kinds = self.mesh.device, (self._came, self._values, self._parts)
        sums = [total(kind[n]).to(device) if n in kind else _zero(device) for kind in kinds for n in self.names]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=device)

    def refuse_incomplete(self, columns: Tensor) -> None:
        """columns: a row per rank. All ranks raise alike."""
        if self.announced is None:
            return
        came = columns[:, : len(self.names)][self._stages].sum(1)
        apart = ~((came - self.announced).abs() <= ROUNDING * self.announced.abs().clamp(min=ROUNDING))
        if not bool(apart.any()):
            return
        ranks = apart.any(1).nonzero().flatten().tolist()
        told = [
            f"rank {rank}: "
            + ", ".join(
                f"{came[rank, i]:g} of {name!r}, {self.announced[rank, i]:g} announced"
                for i, name in enumerate(self.names)
                if apart[rank, i]
            )
            for rank in ranks
        ]
        raise EngineError(
            "IG563",
            "the weights of the step's terms are not those that were announced",
            seen="; ".join(told[:4]) + (f"; and {len(told) - 4} more ranks" if len(told) > 4 else ""),
            expected="on each rank, backwards whose weights add up to what engine.begin (or the model's term_weights) "
            "said: each term was divided by the announced weight",
            fix="announce the sum over all micro-batches of the step, and run all of them",
            where=self.mesh.where(),
        )

    def means(self, columns: Tensor) -> dict[str, Mean]:
        """columns: of the ranks whose things are different ones."""
        sums = columns.reshape(len(columns), 3, len(self.names))[:, 1:]
        return {
            name: mean_of(weight, *(float(total(list(sums[:, kind, i]))) for kind in (0, 1)))
            for i, (name, weight) in enumerate(self.weights.items())
        }

    # -- refusals

    def bad_weight(self, name: str, seen: object) -> EngineError:
        """IG515."""
        return EngineError(
            "IG515",
            f"the weight of the term {name!r} is negative, NaN, infinite, or not one number",
            seen=f"{name}={seen!r}",
            expected="the number of tokens (sequences, ...) that the term is the mean of; 0 for a rank without any",
            where=self.mesh.where(),
        )

    def not_announced(self, seen: str) -> EngineError:
        """IG564."""
        return EngineError(
            "IG564",
            "the weights of this step's terms were not announced before its first backward",
            seen=seen,
            expected="the weight of each term over the whole step, which each backward is divided by",
            fix="engine.begin(name=weight, ...) on every rank before the first backward of a step, with this rank's "
            "sum over its micro-batches; or engine.train_step, with a model that has a method term_weights",
            where=self.mesh.where(),
        )

    def mixed(self) -> EngineError:
        """IG565."""
        return EngineError(
            "IG565",
            "one step or evaluation has terms and losses with one weight",
            seen=f"terms {', '.join(self.names)}, and backward(loss, weight=...)" if self.announced is not None else
            "backward(loss, weight=...), and then terms",
            expected="one kind of backward in a step: the second kind is divided at the step, by one weight",
            fix="engine.backward(ig.Terms(name=(loss, weight))), after engine.begin(name=..., ...)",
            where=self.mesh.where(),
        )  # fmt: skip

    def begun_late(self) -> EngineError:
        """IG566."""
        return EngineError(
            "IG566",
            "engine.begin in the middle of a step",
            seen="a step that has begun, or has gathered gradients, and has not ended",
            expected="begin once, before the first backward of a step",
            fix="engine.step(), or engine.discard() on all ranks, before the next begin",
            where=self.mesh.where(),
        )

    def _refuse_unlike(self, notes: Mapping[int, Mapping[str, float]]) -> None:
        by_names: dict[tuple[str, ...], list[int]] = {}
        for rank, note in notes.items():
            by_names.setdefault(tuple(sorted(note)), []).append(rank)
        if len(by_names) > 1:
            raise EngineError(
                "IG561",
                "ranks announced different terms for one step",
                seen="; ".join(f"ranks {ranks}: {', '.join(names)}" for names, ranks in by_names.items()),
                expected="the same names on every rank; a weight of 0 where a rank has nothing of a term",
                where=self.mesh.where(),
            )

    def _refuse_unequal(self, announced: Tensor) -> None:
        layout = self.mesh.layout
        for axis in ("tp", "pp"):
            for peers in layout.groups(axis):
                rows = announced[list(peers)]
                if bool((rows != rows[0]).any()):
                    raise EngineError(
                        "IG516",
                        f"ranks of one {axis} group announced different weights",
                        seen=f"{', '.join(self.names)}: {rows.tolist()} on ranks {list(peers)}",
                        expected="the same batch, and so the same weights, on every rank of a tp or pp group",
                        fix="index the data by mesh.index('dp'), not by the global rank",
                        where=self.mesh.where(),
                    )


# -- numbers


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


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _is_zero(weight: Tensor | float) -> bool:
    """A weight on a GPU is not looked at, which would make the GPU wait."""
    return (not isinstance(weight, Tensor) or weight.device.type == "cpu") and float(weight) == 0


def _is_weight(weight: object, waits: bool = False) -> bool:
    """`waits`: a number on a GPU is looked at, too."""
    if isinstance(weight, Tensor):
        looks = waits or weight.device.type == "cpu"
        return weight.numel() == 1 and (not looks or 0 <= float(weight) < math.inf)
    return isinstance(weight, Real) and 0 <= float(weight) < math.inf
