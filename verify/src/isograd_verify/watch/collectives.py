"""Sees every operator of a running program through a dispatch mode, and notes the few kinds that matter.

Everything else passes through. DTensors are sent on to their own rule first, so what they do to real tensors is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from isograd_verify import tolerances
from isograd_verify.record.events import REDUCING, End, Logits, RowSums
from isograd_verify.record.sketch import dtype_name
from isograd_verify.watch import foreign
from isograd_verify.watch.flows import OUTPUTS, Flows
from isograd_verify.watch.labels import Labels
from isograd_verify.watch.means import SEEN, Means
from isograd_verify.watch.recorder import Recorder
from isograd_verify.watch.rewritten import Rewrites
from isograd_verify.watch.routing import Routing
from isograd_verify.watch.states import States
from isograd_verify.watch.terms import TermTracker

_NAMESPACES = ("c10d", "_c10d_functional")
_OPS = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce", "all_reduce_coalesced": "all_reduce", "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather", "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_": "reduce", "gather_": "gather", "scatter_": "scatter",
    "broadcast_": "broadcast", "broadcast": "broadcast",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "send": "send", "recv_": "recv", "recv_any_source_": "recv", "barrier": "barrier",
}  # fmt: skip
LIMIT = 1 << 24  # numbers that come back to an embedding in one call
_DRAWS = ("bernoulli_", "bernoulli", "native_dropout", "rand_like", "rand", "uniform_", "normal_", "randn_like")


class WatchMode(TorchDispatchMode):
    """Passes every operator on unchanged; tells the listener about those above."""

    def __init__(self, listener: Recorder, labels: Labels, rewrites: Rewrites, routing: Routing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listener, self.labels, self.rewrites, self.routing = listener, labels, rewrites, routing
        self.kinds: dict[Any, Callable[..., Any] | None] = {}
        self.off = False
        self.flows, self.states = Flows(), States(listener)
        self.means, self.terms = Means(listener), TermTracker(listener)
        self.loopback: Callable[[str, dict[str, Any]], Any] | None = None  # how a world of one sends to itself
        self.open: tuple[int, float] | None = None  # the collective last issued: it ends when the next operator runs

    def enter_below(self) -> None:
        """Under the modes that the program is in just now: each of them leaves by taking off the top of the stack."""
        above: list[TorchDispatchMode] = []
        while (top := _get_current_dispatch_mode()) is not None and not top.is_infra_mode():
            above.append(_pop_mode())
        self.__enter__()  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)

    def suspend(self) -> bool:
        """Out of the way of the listener's own operators, until `resume`; whether it was in the way."""
        if _get_current_dispatch_mode() is not self:
            return False
        _pop_mode()
        self.off = True
        return True

    def resume(self) -> None:
        """Return to the top of the stack of dispatch modes, after `suspend`."""
        if self.off:
            self.off = False
            _push_mode(self)

    def leave(self) -> bool:
        """Whether it could: not while a mode that the program entered later is on top."""
        self.resume()
        if _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.listener.active:
            return func(*args, **kwargs)
        if any(t is not Tensor and issubclass(t, foreign.DTensor) for t in types):
            if func is torch.ops.aten._log_softmax_backward_data.default and foreign.rewritten(func):
                self._try("logits", self._logit_shift, args)
            return NotImplemented
        try:
            handler = self.kinds[func]
        except KeyError:
            handler = self.kinds[func] = self._handler(func)
        if self.open is not None and self.listener.writer is not None:
            number, began = self.open
            self.listener.writer.event(End(*self.listener.now, n=number, seconds=time.time() - began))
        self.open = None
        if self.means.fresh:
            self._try("means", self.means.hook_fresh)
        if self.terms.fresh:
            self._try("terms", self.terms.note_fresh)
        if handler is None:
            self._try("changes", self.rewrites.look, func, args)
        known = handler is not None and not foreign.imagined(args)
        result = handler(func, args, kwargs) if known else func(*args, **kwargs)  # type: ignore[misc]
        if type(result) is Tensor and result.dim() == 0 and result.is_floating_point():
            self._try("losses", self._number, args, result)
        if self.flows.marks and func.namespace != "c10d":
            self._try("flows", self.flows.carry, func, args, kwargs, result)
        if self.states.flows.marks and func.namespace != "c10d":
            self._try("states", self.states.carry, func, args, kwargs, result)
        return result

    def _number(self, args: Any, result: Tensor) -> None:
        many = any(type(t) is Tensor and t.requires_grad and t.dim() for t in args)
        if many and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.listener.reduced = foreign.call_site(self.listener.base)
            self.terms.fresh.append((result, self.listener.reduced))

    def _try(self, sense: str, what: Callable[..., Any], *args: Any) -> Any:
        """An error costs this sense, not the program and not the other senses."""
        if sense in self.listener.blinded:
            return None
        try:
            return what(*args)
        except Exception as error:
            self.listener.lose(sense, error)
            return None

    def _handler(self, func: Any) -> Callable[..., Any] | None:
        name = func._schema.name.partition("::")[2]
        if func.namespace in _NAMESPACES:
            return self._collective if name in _OPS else None
        if func.namespace == "aten":
            if name in ("nll_loss_forward", "nll_loss2d_forward"):
                return self._after("labels", self._labels)
            if name in ("nll_loss_backward", "nll_loss2d_backward"):
                return self._after("labels", lambda name, args, kwargs, result: self.labels.backward(args))
            if name in SEEN and func._overloadname in ("default", "Tensor", "Scalar"):
                return self._after("means", self.means.look)
            if name == "embedding_dense_backward":
                return self._after("rows", self._row_sums)
            spread = self._after("states", self.states.spread)
            return {"topk": self._choice, "std": spread, "var": spread, **dict.fromkeys(_DRAWS, self._draw)}.get(name)
        return None

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        began = time.perf_counter()
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        told = self._try("collectives", self._note_call, func, named)
        if told is None:
            return func(*args, **kwargs)
        call, number = told
        self.listener.own_seconds += time.perf_counter() - began
        start = time.time()
        by_itself = self.loopback is not None and call.op in ("send", "recv")
        result = self.loopback(call.op, named) if by_itself and self.loopback else func(*args, **kwargs)
        self.open = (number, start)
        if self.flows.marks:
            self._try("flows", self.flows.travel, named, result)
        if call.cuts:
            self._try("flows", self.flows.begin, number, call.op, named, result, call.ranks)
        return result

    def _note_call(self, func: Any, named: dict[str, Any]) -> tuple[_Call, int]:
        call = _Call(func, named)
        noted = self.listener.collective(call.op, call.ranks, call.tensors, call.peer)
        reduced = call.tensors if noted.op in REDUCING else []
        self.rewrites.communicated(noted.covers, reduced, noted.numel)
        self.states.reduced(reduced)
        return call, noted.n

    def _after(self, sense: str, look: Callable[..., None]) -> Callable[..., Any]:
        """A handler that runs the operator, and shows its arguments and what it made."""

        def handler(func: Any, args: Any, kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            self._try(sense, look, func._schema.name.partition("::")[2], args, kwargs, result)
            return result

        return handler

    def _labels(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        site = self.labels.forward(args, result)
        if result[0].dim() == 0:
            self.terms.fresh.append((result[0], site))

    def _row_sums(self, name: str, args: Any, kwargs: Any, made: Tensor) -> None:
        """An embedding's backward has added rows of one token id: in half precision it is done again in fp64."""
        came, ids, _, padding, by_count = args[:5]
        used = ids.flatten() != padding
        half = made.dtype in (torch.bfloat16, torch.float16)
        if not half or by_count or came.numel() > LIMIT or not bool(used.any()):
            return
        which, places, counts = ids.flatten()[used].unique(return_inverse=True, return_counts=True)
        exact = torch.zeros(len(which), made.shape[1], dtype=torch.float64, device=made.device)
        exact.index_add_(0, places, came.detach().flatten(0, -2)[used].double())
        apart = (made.detach()[which].double() - exact).norm(dim=1)
        error, worst = float(apart.norm() / exact.norm().clamp_min(1e-300)), int(apart.argmax())
        if error > tolerances.ROW_SUMS * torch.finfo(made.dtype).eps:
            c, id_of, times, kind = self.listener, int(which[worst]), int(counts[worst]), dtype_name(made)
            alike = [n for m, n in c.modules.items() if isinstance(m, nn.Embedding) and m.weight.shape == made.shape]
            module = alike[0] if len(alike) == 1 else c.behind
            c.event(RowSums(*c.now, module=module, dtype=kind, error=error, token=id_of, times=times))

    def _logit_shift(self, args: Any) -> None:
        """Under torch's loss_parallel, log_softmax has no backward of its own. The gradient of a row must sum to zero
        over the vocabulary: this rank tells its part of that sum, over all rows with random signs."""
        gradient = foreign.local(args[0]).detach().double().movedim(args[2], -1).flatten(0, -2)
        signs = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        shift, size = float(gradient.sum(1) @ signs), float(gradient.abs().sum(1) @ signs.abs())
        self.listener.event(Logits(*self.listener.now, shift=shift, size=size))

    def _choice(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        instead = self._try("choices", self._chosen, args, result[1])
        return result if instead is None or "values" in kwargs else (args[0].gather(-1, instead), instead)

    def _chosen(self, args: Any, indices: Tensor) -> Tensor | None:
        """Of a choice along another dimension, or of the smallest, `scores` have no rows of the same length."""
        plain = len(args) < 3 or args[2] in (-1, args[0].dim() - 1)
        scores = args[0] if plain and (len(args) < 4 or args[3]) else indices
        return self.routing.chosen(scores, indices, foreign.call_site(self.listener.base))

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.listener.drawn:
            self.listener.drawn[-1] = True
        return func(*args, **kwargs)


class _Call:
    """What a collective was given."""

    def __init__(self, func: Any, named: dict[str, Any]) -> None:
        self.op = _OPS[func._schema.name.partition("::")[2]]
        self.ranks = foreign.members(named.get("process_group", named.get("group_name")))
        self.tensors = foreign.tensors_in([v for k, v in named.items() if k not in OUTPUTS]) or foreign.tensors_in(
            list(named.values())
        )
        to = named.get("dst")
        self.peer = self.ranks[to] if type(to) is int and 0 <= to < len(self.ranks) else -1
        self.cuts = torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)
