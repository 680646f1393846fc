"""A layer of experts in place of the feed-forward layer: each token goes to k of them, and to the shared one.

One device: naive.moe. docs/experts.md says what happens to a token.

Tokens are cut over dp and cp, and in here over tp as well. Under sp they arrive cut. Without sp all tp ranks hold the
same tokens: each takes its slice, so that a token is routed once, and the adjoint of the slice gathers. Every rank's
router therefore sees other tokens than its tp neighbours' do, with and without sp, and its gradient owes tp. The shared
expert is a dense layer under tp. Its gate multiplies the residual stream's own rows, and owes what a norm there owes.

A rank without tokens enters every exchange. Padding at the end of sequences (cp, sp) is no token: it is not routed,
not counted, and the layer gives 0 for it.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.core.input_checks import ScoreCheck
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.core.step_counters import StepCounter
from isograd.nn import balance, routing
from isograd.nn.experts import Experts, from_slots, reorder, to_slots
from isograd.nn.mlp import ACTIVATIONS, MLP
from isograd.nn.parameter import FactoryKwargs, Layer, make
from isograd.nn.routing import Ends, ExpertOptions, Route, Sent
from isograd.nn.split_backward import linear
from isograd.nn.stream import Stream, stream_partial_over


class Router(Layer):
    """One row of logits per token."""

    def __init__(
        self, hidden: int, outputs: int, mesh: Mesh, *, key: Key, partial_over: tuple[str, ...], **made: Any
    ) -> None:
        super().__init__()
        self.weight = make(mesh, (outputs, hidden), partial_over=partial_over, key=key, **made)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, outputs]."""
        return linear(x, self.weight)


class MoE(nn.Module):
    """Routed experts, and a shared one where the options have it."""

    def __init__(
        self,
        hidden: int,
        options: ExpertOptions,
        mesh: Mesh,
        *,
        key: Key,
        name: str = "a layer of experts",
        activation: str = "silu",
        gated: bool = True,
        std: float = 0.02,
        out_std: float | None = None,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        """`name`: of this layer in the model, for messages."""
        super().__init__()
        routing.refuse_cut(options, mesh.layout.ep, mesh.describe_rank())
        self.mesh, self.options = mesh, options
        self.router = Router(
            hidden, options.number, mesh, key=key.fold("router"), partial_over=("tp",), std=std, **made
        )
        self.experts = Experts(
            hidden, options, mesh, key=key.fold("experts"), activation=ACTIVATIONS[activation], gated=gated,
            std=std, out_std=out_std or std, **made,
        )  # fmt: skip
        self.shared = self.shared_gate = None
        if options.shared:
            self.shared = MLP(
                hidden, options.shared, mesh, key=key.fold("shared"), activation=activation, gated=gated,
                std=std, out_std=out_std, **made,
            )  # fmt: skip
        if options.shared_gate:
            owes = stream_partial_over(mesh)
            self.shared_gate = Router(hidden, 1, mesh, key=key.fold("shared gate"), partial_over=owes, std=std, **made)
        self.choose = routing.choose  # a rehearsal, which has no scores, states a load in its place
        self.wrong = ScoreCheck(name)
        self.load = StepCounter(options.number, needs_prepass=options.balance == "batch", use=self._committed)
        # Buffers have values from the start: only parameters may be without memory.
        place = mesh.device
        self.choice_bias: Tensor | None
        self.counts_before: Tensor | None
        bias = torch.zeros(options.number, dtype=torch.float32, device=place) if options.choice_bias else None
        lagged = torch.zeros(options.number, dtype=torch.int64, device=place) if options.balance == "lagged" else None
        self.register_buffer("choice_bias", bias)
        self.register_buffer("counts_before", lagged)

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        """What .to(), .bfloat16() and the like call. The bias of the choice stays in fp32 at least: in bf16 its small
        changes would be rounded away."""
        bias = self.choice_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.choice_bias is not None and self.choice_bias.dtype.itemsize < bias.dtype.itemsize:
            self.choice_bias = bias.to(self.choice_bias.device)
        return self

    def forward(self, x: Tensor, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """The residual stream in and out; and, in training, the sums [balance, z] over all tokens of this data rank."""
        routed, sums = self._routed(x, stream)
        if self.shared is None:
            return routed, sums
        common = self.shared(x)
        if self.shared_gate is not None:
            common = common * self.shared_gate(x).sigmoid()
        return routed + common, sums

    @ops.uncompiled
    def _routed(self, x: Tensor, stream: Stream) -> tuple[Tensor, Tensor | None]:
        tp, sp, here = self.mesh.group("tp"), self.mesh.layout.sp, balance.RoutedRows.of(stream, self.mesh)
        if not sp:
            x = ops.slice(x, tp, sizes=here.sizes)
        logits = self.router(x)
        scores = routing.scores_of(logits, self.options)
        memory = stream.remembered
        route = None if memory is None else memory.route
        first = route is None
        if route is None:
            self.wrong.find(scores)
            route = self._route(scores.detach(), here)
            if memory is not None:
                memory.route = route
        weights = routing.weights_of(scores, route.indices, self.options)
        y = self._through(x, weights, route)
        if first:
            number = self.options.number
            counts = routing.count(route.indices.masked_fill(~here.real[:, None], number), number + 1)[:-1]
            self.load.add(counts, self.training, y)
        sums = None
        if self.training and torch.is_grad_enabled():
            of_scope = self.counts_before if self.options.balance == "lagged" else self.load.step_total
            sums = balance.sums(logits, scores, route, here, self.options, of_scope)
        if not sp:
            y = ops.gather_for_identical_use(y, tp, sizes=here.sizes)
        return y, sums

    @torch.no_grad()
    def _route(self, scores: Tensor, here: balance.RoutedRows) -> Route:
        """Choose, count, and tell the other ranks of the ep group how many slots come."""
        options, k = self.options, self.options.per_token
        indices = self.choose(scores, options, self.choice_bias)
        kept = here.real[:, None].expand(-1, k)
        wants_counts = options.balance == "sequence" and self.training
        counts = here.counts(indices, options.number) if wants_counts else None
        slots = options.slots_of(here.length)
        if slots is not None:
            kept = kept & here.scatter(routing.within_capacity(here.gather(indices), slots))
        expert = indices.masked_fill(~kept, options.number).flatten()
        order = expert.argsort(stable=True)
        wanted = routing.count(expert, options.number + 1)[:-1]
        group = self.mesh.group("ep")
        if group.size == 1:  # nothing that the host must know
            return Route(indices, order, Ends(wanted.cumsum(0), rest=slots is not None or here.padded), counts)
        table = wanted.view(group.size, -1)  # [members, experts of each]
        arriving = torch.stack(raw.all_to_all(table.unbind(), [table.shape[1:]] * group.size, group, control=True))
        ends = arriving.sum(0).cumsum(0)
        sizes = torch.cat((table.sum(1), arriving.sum(1), ends))  # the layer's one wait for a card
        out, into, read = (part.tolist() for part in raw.to_host(sizes).split((group.size, group.size, len(ends))))
        number = torch.arange(table.shape[1], device=table.device).repeat(group.size)
        sorting = number.repeat_interleave(arriving.flatten(), output_size=sum(into)).argsort(stable=True)
        sent = Sent(out, into, sorting, sorting.argsort())
        return Route(indices, order[: sum(out)], Ends(ends, read=tuple(read)), counts, sent)

    def _through(self, x: Tensor, weights: Tensor, route: Route) -> Tensor:
        group, sent = self.mesh.group("ep"), route.sent
        slots = to_slots(x, route.order, self.options.per_token)
        if sent is not None:
            slots = reorder(ops.exchange_rows(slots, group, sent.out, sent.into), sent.by_expert)
        slots = self.experts(slots, route.ends)
        if sent is not None:
            slots = ops.exchange_rows(reorder(slots, sent.by_sender), group, sent.into, sent.out)
        return from_slots(slots, weights, route.order)

    def relative_load(self) -> Tensor | None:
        """How often each expert was chosen in the step before, over an even share; equal on all ranks of a stage."""
        return None if self.load.last is None else balance.relative(self.load.last)

    def _committed(self, counts: Tensor) -> None:
        """At the end of a step, with how often each expert was chosen in it, anywhere."""
        if self.counts_before is not None:
            self.counts_before.copy_(counts)
        if self.choice_bias is not None:
            short = (counts.double().mean() - counts).sign()
            self.choice_bias += self.options.choice_bias_rate * short.to(self.choice_bias.dtype)
