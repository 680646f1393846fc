"""Which experts a token goes to, and with what weights: token choice, as in the published models.

Ties have a defined order: of equal scores, the expert of the lower number is chosen. They are real: zero-initialised
routers and equal tokens make them, and torch.topk promises no order. Nothing here knows a layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.errors import ModelError, did_you_mean

SCORES = ("softmax", "sigmoid")
SCOPES = ("none", "sequence", "batch", "lagged")


def is_a(value: object, kind: str) -> bool:
    """Whether a value is what an option's annotation says: a bool is no number, and a whole number is a float, too."""
    if isinstance(value, tuple):
        return kind == "tuple[int, ...]" and len(value) <= 1 << 16 and all(is_a(one, "int") for one in value)
    names = {"bool"} if isinstance(value, bool) else {one.__name__ for one in type(value).__mro__}
    names |= {"float"} if "int" in names else set()
    return not names.isdisjoint(kind.replace("None", "NoneType").split(" | "))


def mistyped(values: dict[str, Any], kinds: dict[str, str]) -> list[str]:
    """Those of some options that are not what their annotations say."""
    return [f"{name} is of type {kinds[name]}, not {v!r}" for name, v in values.items() if not is_a(v, kinds[name])]


def kinds_of(options: Any) -> dict[str, str]:
    """The annotations of a dataclass of options, or of one of its objects, by name."""
    return {field.name: str(field.type) for field in fields(options)}


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """The options of a layer of experts. Values that contradict each other are refused, all at once."""

    number: int
    per_token: int  # k: how many experts a token goes to
    width: int  # inner features of one expert
    shared: int = 0  # inner features of the expert that every token goes to; 0: there is none
    shared_gate: bool = False  # whether its output is multiplied with a sigmoid of its own
    dense_first: int = 0  # how many of the first layers have no experts
    every: int = 1  # of the others, every n-th layer has experts: n - 1, 2n - 1, ... counted from 0
    scores: str = "softmax"  # "softmax" | "sigmoid"
    renormalise: bool = True  # whether the weights of the chosen experts are divided by their sum
    groups: int = 1  # of experts, of which only `chosen_groups` are chosen from: the best by the sum of their best two
    chosen_groups: int = 1
    scale: float = 1.0  # of the routed output
    choice_bias: bool = False  # whether a bias, for the choice alone, follows the experts' load
    choice_bias_rate: float = 0.001  # its change in a step
    balance: str = "sequence"  # whose counts the balance loss uses: "sequence" | "batch" | "lagged" | "none"
    balance_weight: float = 0.01
    z_weight: float = 0.0  # of the mean squared log-sum-exp of the router's logits
    capacity: float | None = None  # slots of an expert for each sequence, over an even share; None: nothing is dropped
    capacity_scope: str = "sequence"

    def __post_init__(self) -> None:
        problems = mistyped(vars(self), kinds_of(self)) or self._problems()
        if problems:
            raise ModelError("IG450", "invalid experts: " + "; ".join(problems), fix="fix every point above")
        self._refuse_idle_router()
        if self.capacity_scope != "sequence":
            raise ModelError("IG452", capacity_scope=self.capacity_scope)

    def _problems(self) -> list[str]:
        problems = [
            f"{name} must be at least {least}, not {getattr(self, name)}"
            for name, least in (
                ("number", 1), ("per_token", 1), ("width", 1), ("shared", 0), ("dense_first", 0), ("every", 1),
                ("groups", 1), ("chosen_groups", 1),
            )
            if getattr(self, name) < least
        ]  # fmt: skip
        if self.per_token > self.number:
            problems.append(f"a token cannot go to {self.per_token} of {self.number} experts")
        if self.scores not in SCORES:
            problems.append(f"scores are softmax or sigmoid, not {self.scores!r}{did_you_mean(self.scores, SCORES)}")
        if self.balance not in SCOPES:
            problems.append(f"balance is {', '.join(SCOPES)}, not {self.balance!r}{did_you_mean(self.balance, SCOPES)}")
        size = self.number // max(1, self.groups)
        if self.groups > 0 and self.number % self.groups:
            problems.append(f"{self.groups} groups do not divide {self.number} experts")
        elif self.per_token <= self.number and not self.per_token <= self.chosen_groups * size <= self.number:
            chosen = f"{self.chosen_groups} of {self.groups} groups of {size}"
            problems.append(f"{self.per_token} experts of a token cannot be in {chosen}")
        numbers = ("scale", "choice_bias_rate", "balance_weight", "z_weight")
        problems += [
            f"{name} must be finite and not negative, not {value}"
            for name in numbers
            if not (math.isfinite(value := getattr(self, name)) and value >= 0)
        ]
        if self.scale == 0:
            problems.append("scale must not be 0: experts and their router would have no gradient")
        if self.shared_gate and not self.shared:
            problems.append("shared_gate without a shared expert")
        if self.capacity is not None and not (self.capacity > 0 and math.isfinite(self.capacity)):
            problems.append(f"capacity must be positive and finite, not {self.capacity}")
        return problems

    def _refuse_idle_router(self) -> None:
        """Refuse options under which the weight of a chosen expert is a constant."""
        if self.per_token == 1 and self.renormalise:
            raise ModelError(
                "IG451",
                "with one expert per token, renormalised weights are all 1, and the router learns nothing",
                seen="per_token 1, renormalise true",
                expected="renormalise false for per_token 1: the weight is the score itself",
            )
        if self.number == 1 and self.scores == "softmax":
            raise ModelError(
                "IG451",
                "the softmax of a single expert's score is 1, and the router learns nothing",
                seen="number 1, scores 'softmax'",
                expected="two experts or more, or sigmoid scores",
                fix="a layer without a router is the model's mlp: leave experts out",
            )

    def in_layer(self, number: int) -> bool:
        """Whether the layer of this number has experts."""
        return number >= self.dense_first and (number + 1) % self.every == 0

    def slots_of(self, length: int) -> int | None:
        """How many slots an expert has for a sequence of `length` tokens; None: as many as are wanted."""
        if self.capacity is None:
            return None
        return math.ceil(length * self.per_token / self.number * self.capacity)


@dataclass(frozen=True)
class Sent:
    """How the slots of one call cross the ep group."""

    out: list[int]  # slots for each member
    into: list[int]  # slots from each member
    by_expert: Tensor  # int64 [slots received]: slots arrive by sender and are computed by expert
    by_sender: Tensor  # the way back


@dataclass
class Ends:
    """Where the slots of each expert end. The host reads it only where torch has no kernel that does so on the card."""

    there: Tensor  # int64 [experts], where the slots are
    rest: bool = False  # whether slots that no expert computes may lie behind the last end
    read: tuple[int, ...] | None = None  # by the host

    @property
    def here(self) -> tuple[int, ...]:
        """The same numbers. The host waits at most once for them."""
        if self.read is None:
            self.read = tuple(raw.to_host(self.there).tolist())
        return self.read


@dataclass(frozen=True)
class Route:
    """Where the tokens of one call of a layer went: whole numbers, which a recomputed forward uses again."""

    indices: Tensor  # int64 [T, k]: the experts of each token, in the order of falling scores
    order: Tensor  # int64 [slots]: token * k + place, by expert; slots that are dropped come last, or not at all
    ends: Ends  # of the slots of each expert here
    counts: Tensor | None  # int64 [sequences, experts]: how often whole sequences chose each expert, if it is used
    sent: Sent | None = None  # None: all experts are here


@dataclass
class Remembered:
    """The route of a call that may be run again in backward. Its first run fills it in."""

    route: Route | None = None


def scores_of(logits: Tensor, options: ExpertOptions) -> Tensor:
    """[T, experts], in fp32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.softmax(-1) if options.scores == "softmax" else wide.sigmoid()


@torch.no_grad()
def choose(scores: Tensor, options: ExpertOptions, bias: Tensor | None = None) -> Tensor:
    """The experts [T, k] of each token, in the order of falling scores; of equal ones, the lower number first."""
    ranked = scores if bias is None else scores + bias.to(scores.dtype)
    if options.chosen_groups < options.groups:
        grouped = ranked.unflatten(-1, (options.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        chosen = _first(best, options.chosen_groups)
        open_ = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
        ranked = grouped.masked_fill(~open_[..., None], -torch.inf).flatten(-2)
    return _first(ranked, options.per_token)


def _first(ranked: Tensor, count: int) -> Tensor:
    return ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def weights_of(scores: Tensor, indices: Tensor, options: ExpertOptions) -> Tensor:
    """The weights [T, k] with which the chosen experts' outputs are added."""
    weights = scores.gather(-1, indices)
    if options.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if options.scores == "sigmoid" else 0.0))
    return weights * options.scale if options.scale != 1.0 else weights


def count(numbers: Tensor, size: int) -> Tensor:
    """int64 [size]: how often each number occurs. (torch.bincount would make the host wait for a card.)"""
    flat = numbers.flatten()
    return flat.new_zeros(size).scatter_add_(0, flat, torch.ones_like(flat))


def within_capacity(indices: Tensor, slots: int) -> Tensor:
    """Bool [b, length, k]: of whole sequences, which slots an expert has room for: those of earlier tokens first."""
    flat = indices.flatten(1)  # [b, length * k] in the order in which room is given
    order = flat.sort(dim=-1, stable=True)  # by expert
    place = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    first = torch.searchsorted(order.values, order.values)  # where each expert's slots begin
    rank = torch.empty_like(flat).scatter_(-1, order.indices, place - first)
    return (rank < slots).view(indices.shape)


def refuse_cut(options: ExpertOptions, ranks: int, where: str) -> None:
    """Experts are dealt out over ep in equal numbers."""
    if options.number % ranks:
        nearest = max(
            n for n in range(1, ranks + 1) if options.number % n == 0 and ranks % n == 0
        )  # fits the ranks, too
        few = ": some ranks would have none" if ranks > options.number else ""
        raise ModelError("IG453", where=where, number=options.number, ranks=ranks, few=few, nearest=nearest)
