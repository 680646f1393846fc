"""Experts of a model of transformers, dealt out over ep by its expert plan.

The library's module computes, with its own code, on the rows that were brought to this rank:

    1. Each (token, choice) pair is a slot. Slots go to the ranks that hold their experts, with their scores.
    2. The library's forward runs on the slots that arrived, as tokens with one choice each, and applies the scores.
    3. The results go back, and each token's are added in the order of its choices.

An expert has then seen the tokens of its whole ep group, so its gradient owes edp and nothing else. Ranks of a tp group
hold the same tokens: each sends its slice of them, behind the router, and the results are gathered. So the router is
computed alike on them from the whole, and owes dp and cp, as any parameter does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.group import even_sizes
from isograd.core.contract import Shard
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.hf.tp_plan import is_below, names_of_towers, pattern_of
from isograd.nn.experts import from_slots, to_slots
from isograd.nn.routing import count

DISPATCHED = "ep_dispatch_experts"


def dispatched(model: Any, mesh: Mesh) -> list[str]:
    """The names of the layers of experts that the expert plan deals out."""
    config, name = model.config, type(model).__name__
    plan: dict[str, str] = getattr(model, "ep_plan", None) or {}
    wanted = {pattern for pattern, style in plan.items() if style == DISPATCHED}
    towers = names_of_towers(model)
    found = [n for n, _ in model.named_modules() if pattern_of(n) in wanted and not is_below(n, towers)]
    if not found:
        seen = f"expert plan {sorted(plan)}" if plan else f"no base_model_ep_plan in {type(config).__name__}"
        raise ModelError("IG472", seen=seen, where=mesh.describe_rank(), name=name, style=DISPATCHED)
    return found


def number_of(name: str, module: Any, mesh: Mesh, style: str) -> int:
    """How many experts a module holds, if all of its parameters are stacks of them."""
    number = getattr(module, "num_experts", None)
    own = dict(module.named_parameters(recurse=False))
    odd = [leaf for leaf, p in own.items() if p.shape[0] != number]
    inner = [leaf for leaf, _ in module.named_parameters() if leaf not in own]
    elsewhere = style != DISPATCHED and not hasattr(module, "_is_expert_parallel")  # computes what others hold, too
    if not isinstance(number, int) or not own or odd or inner or elsewhere:
        raise ModelError(
            "IG464",
            seen=f"a {type(module).__name__} whose parameters are not one stack of experts: {odd + inner}",
            where=mesh.describe_rank(),
            style=style,
            name=name,
        )
    return number


def shard_of(name: str, number: int, axis: str, mesh: Mesh) -> Shard:
    """Whole experts on each rank of an axis."""
    parts = mesh.size(axis)
    if number % parts:
        raise ModelError(
            "IG465", seen=str(mesh.layout), expected=f"{axis} that divides the number of experts",
            where=mesh.describe_rank(), what_is_cut=f"the {number} experts of {name}", axis=axis, size=parts,
        )  # fmt: skip
    return Shard.even(axis, 0, number, parts)


def deal_out(module: Any, number: int, mesh: Mesh) -> None:
    """Let the module compute on the slots that the ranks of its ep group bring here. Its parameters are cut before."""
    module.num_experts = number // mesh.size("ep")
    hooks = Exchange(mesh, module.num_experts)
    module.register_forward_pre_hook(hooks.before, with_kwargs=True)
    module.register_forward_hook(hooks.after)


@dataclass(frozen=True)
class _Sent:
    """What one forward has sent, for the way back."""

    shape: torch.Size  # of the tokens as they were given
    tp_sizes: tuple[int, ...]  # tokens of each tp rank
    tokens: int  # of this rank
    choices: int
    order: Tensor  # token * choices + place, of each slot that was sent
    out: list[int]  # slots to each member
    into: list[int]  # slots from each


@dataclass(eq=False)
class Exchange:
    """Hooks around the library's experts."""

    mesh: Mesh
    here: int  # how many experts this rank holds
    sent: _Sent | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """(tokens [..., hidden], numbers [T, k], scores [T, k]) -> the same of the slots for the experts here."""
        x, numbers, scores = (*args, *kwargs.values())[:3]
        group, tp = self.mesh.group("ep"), self.mesh.group("tp")
        shape, choices = x.shape, numbers.shape[-1]
        x = x.reshape(-1, shape[-1])
        sizes = tuple(even_sizes(len(x), tp.size))
        if tp.size > 1 and not self.mesh.layout.sp:  # with sp, ranks of a tp group have different tokens
            numbers = numbers.split(list(sizes))[tp.index]
            x, scores = (ops.slice(t, tp, 0, sizes) for t in (x, scores))
        # A choice of no expert, whose number is too high, is not sent.
        member = numbers.flatten().div(self.here, rounding_mode="floor").clamp(max=group.size)
        counts = count(member, group.size + 1)[:-1]
        arriving = torch.stack(raw.all_to_all(counts.unbind(), [()] * group.size, group))
        out, into = raw.to_host(torch.stack((counts, arriving))).tolist()  # the layer's one wait
        order = member.argsort(stable=True)[: sum(out)]
        self.sent = _Sent(shape, sizes, len(x), choices, order, out, into)
        asked = (numbers.flatten()[order] % self.here).split(out)
        mine = torch.cat(raw.all_to_all(asked, [(n,) for n in into], group))
        rows = ops.exchange_rows(to_slots(x, order, choices), group, out, into)
        share = ops.exchange_rows(scores.reshape(-1, 1)[order], group, out, into)
        if not len(mine):  # an empty row keeps this rank's experts in backward, in which others wait for it
            rows, share, mine = rows.sum(0, keepdim=True), share.sum(0, keepdim=True), mine.new_zeros(1)
        given = rows, mine[:, None], share
        return (*given[: len(args)], *args[3:]), dict(zip(kwargs, given[len(args) :], strict=False))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Results of slots -> of the tokens that were given."""
        sent, self.sent = self.sent, None
        assert sent is not None
        slots = ops.exchange_rows(output[: sum(sent.into)], self.mesh.group("ep"), sent.into, sent.out)
        ones = slots.new_ones(sent.tokens, sent.choices)
        y = from_slots(slots, ones, sent.order)
        if not self.mesh.layout.sp:
            y = ops.gather_for_identical_use(y, self.mesh.group("tp"), 0, sent.tp_sizes)
        return y.view(sent.shape)


def without_experts(plan: dict[str, str], experts: Iterable[str]) -> dict[str, str]:
    """The entries of a plan that are not of these layers of experts."""
    homes = tuple(f"{name}." for name in experts)
    return {name: style for name, style in plan.items() if not f"{name}.".startswith(homes)} if homes else plan
