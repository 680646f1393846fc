"""Mutants of sequences cut over cp: blocks lost or doubled on their way, borders, positions and heads miscounted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from isograd.comm.group import Group
from isograd.comm.handle import Handle

Broken = Callable[..., Any]


def exchange_ways() -> dict[str, Callable[[Broken], Broken]]:
    """Of blocks that are sent to other members: (out, into, group, tag) -> a handle."""

    def landed(f: Broken, change: Callable[[torch.Tensor], torch.Tensor]) -> Broken:
        def broken(out: Any, into: Any, group: Group, *tag: int) -> Handle:
            flight = f(out, into, group, *tag)

            def finish() -> None:
                flight.wait()
                for t in (t for pieces in into for t in pieces):
                    t.copy_(change(t))

            return Handle().and_then(finish)

        return broken

    return {
        "removed": lambda f: landed(f, torch.zeros_like),
        "doubled": lambda f: landed(f, lambda t: t * 2.0),
        "averaged": lambda f: landed(f, lambda t: t / 2.0),
        "reordered": lambda f: landed(f, lambda t: t.roll(1, 0)),
    }


def _target_lost_at_a_border() -> Any:
    """As when labels are shifted after the sequence is cut: each rank's last token has no target."""
    from isograd.sequence.token_layout import TokenLayout

    original = TokenLayout.shard

    def shard(self: Any, x: torch.Tensor, rank: int, pad: float = 0) -> torch.Tensor:
        part = original(self, x, rank, pad)
        return part if pad != -100 else torch.nn.functional.pad(part[:, :-1], (0, 1), value=-100)

    return patch.object(TokenLayout, "shard", shard)


def _positions_from_zero() -> Any:
    from isograd.models.transformer import Transformer

    original = Transformer._stream

    def stream(self: Any, *args: Any) -> Any:
        made = original(self, *args)
        return replace(made, positions=torch.arange(made.length).repeat(made.batch))

    return patch.object(Transformer, "_stream", stream)


def _heads_from_zero() -> Any:
    from isograd.nn import attention

    return patch.object(attention.sequence, "heads_here", lambda heads, kv, mesh: (0, heads // mesh.layout.ulysses))


def _keys_not_sent_home() -> Any:
    from isograd.sequence import ring

    return patch.object(ring._GradReturn, "send", lambda self, step: None)


def _local_log_sum() -> Any:
    """Each block's backward uses that block's own log-sum-exp."""
    from isograd.sequence import block

    original = block.backward

    def backward(g: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, *rest: Any) -> Any:
        return original(g, q, k, v, out, block.forward(q, k, v, *rest)[1], *rest)

    return patch.object(block, "backward", backward)


def _later_blocks_weigh_one() -> Any:
    from isograd.sequence import block

    original = block.fold
    return patch.object(block, "fold", lambda out, total, more, more_total: original(out, total, more, total.clone()))


NAMED: dict[str, Callable[[], Any]] = {
    "sequence: the target at a border lost": _target_lost_at_a_border,
    "sequence: positions counted from 0 on every cp rank": _positions_from_zero,
    "sequence: dropout's heads counted from 0 on every cp rank": _heads_from_zero,
    "sequence: gradients of keys not sent home": _keys_not_sent_home,
    "sequence: a block's own log-sum-exp in backward": _local_log_sum,
    "sequence: blocks joined without their weights": _later_blocks_weigh_one,
}
