"""One decoder whose options are data: GPT-2, GPT-NeoX, Llama, Qwen 3, Mistral and SmolLM are configs of it.

    model = Transformer(config, mesh)
    loss, count = model(tokens, labels)        # labels[i] is what position i should predict; -100 does not count
    logits = model(tokens)

Inside, tokens are one flattened stream x [tokens, hidden]. No collective is named here: layers enter and leave
tensor-parallel regions, and the layout decides what that costs.

Under cp, every rank of a cp group is given the SAME whole sequences and takes its own part of each. Labels come
aligned with tokens and are cut with them, so no target is lost at a border. The loss is the mean over this rank's own
labels and the count is theirs: the engine's sum over 'dp cp' makes one mean of all, and nothing is divided by cp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd import random
from isograd.errors import ModelError
from isograd.mesh import Mesh
from isograd.models.config import TransformerConfig
from isograd.nn import MLP, Attention, Head, LayerNorm, LearnedPositions, RMSNorm, Rotary, Stream, VocabEmbedding
from isograd.nn.loss import IGNORE
from isograd.nn.stream import token_ids
from isograd.random import Key
from isograd.sequence import Places, document_starts, gather_whole, places_for, refuse_unlike

Angles = tuple[Tensor, Tensor] | None


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)); or both on the same x (parallel residual)."""

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        rotary: Rotary | None,
        key: Key,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        out_std = config.init_std / (2 * config.layers) ** 0.5  # the residual sum keeps its scale at any depth
        norm = RMSNorm if config.norm == "rms" else LayerNorm
        self.mesh, self.drop, self.parallel = mesh, config.dropout, config.parallel_residual
        self.norm1 = norm(config.hidden, mesh, eps=config.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(
            config.hidden, config.heads, mesh, key=key.fold("attention"), kv_heads=config.kv_heads,
            head_dim=config.head_dim, bias=config.qkv_bias, out_bias=config.out_bias, rotary=rotary,
            qk_norm=config.qk_norm, norm_eps=config.norm_eps, dropout=config.attention_dropout, std=config.init_std,
            out_std=out_std, dtype=dtype, device=device,
        )  # fmt: skip
        self.norm2 = norm(config.hidden, mesh, eps=config.norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(
            config.hidden,
            config.mlp,
            mesh,
            key=key.fold("mlp"),
            activation=config.activation,
            gated=config.gated,
            bias=config.mlp_bias,
            std=config.init_std,
            out_std=out_std,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor, stream: Stream, angles: Angles) -> Tensor:
        attended = stream.dropout(self.attention(self.norm1(x), stream, angles), self.drop, self.mesh, "attention out")
        base = x if self.parallel else x + attended
        fed = stream.dropout(self.mlp(self.norm2(base)), self.drop, self.mesh, "mlp out")
        return base + attended + fed if self.parallel else base + fed


class Transformer(nn.Module):
    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Weights are a function of (seed, name, global index): the same model under every layout."""
        super().__init__()
        _refuse_unbuilt(mesh)
        self.config, self.mesh = config, mesh
        self.recompute = False  # True: blocks keep only their input and run again in backward
        self._compared = False  # whether the ranks of a cp group have once compared the sequences they were given
        key = random.key(seed, "transformer")
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        learned = config.positions == "learned"
        self.rotary = None if learned else Rotary(config.rotary_dims, config.rope_theta)
        std = config.init_std
        self.embed = VocabEmbedding(config.vocab, config.hidden, mesh, key=key.fold("embed"), std=std, **made)
        self.positions = (
            LearnedPositions(config.max_positions, config.hidden, mesh, key=key.fold("positions"), std=std, **made)
            if learned
            else None
        )
        self.blocks = nn.ModuleList(
            Block(config, mesh, self.rotary, key.fold("block", i), dtype, device) for i in range(config.layers)
        )
        norm = RMSNorm if config.norm == "rms" else LayerNorm
        self.norm = norm(config.hidden, mesh, eps=config.norm_eps, **made)
        tied = self.embed.weight if config.tied else None
        self.head = Head(config.vocab, config.hidden, mesh, key=key.fold("head"), std=std, tied=tied, **made)

    @overload
    def forward(self, tokens: Tensor, labels: None = None, *, documents: Tensor | None = None) -> Tensor: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        key: Key | None = None,
        samples: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        key: Key | None = None,
        samples: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens [b, s] of this dp rank. With labels [b, s]: (mean loss, count); without: logits [b, s, vocab].

        Dropout needs `key`, new in every micro-batch and step, and `samples`, the global ids [b] of the sequences.
        documents [b, s] packs several texts into one sequence: where the number changes a new one begins, which sees
        nothing of those before it and whose positions start at 0.
        """
        self._check(tokens, labels, documents, key, samples)
        places, part = places_for(tokens.shape[1], len(tokens), self.mesh), self.mesh.index("cp")
        stream = self._stream(places, tokens, key if self.training else None, samples, documents)
        x = self._body(places.shard(tokens, part).reshape(-1), stream)
        if labels is not None:
            return self.head(x, places.shard(labels, part, IGNORE).reshape(-1))  # type: ignore[no-any-return]
        return gather_whole(self.head.logits(x).view(stream.batch, stream.length, -1), self.mesh, places)

    def _body(self, tokens: Tensor, stream: Stream) -> Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = self.positions(x, stream)
        x = stream.dropout(x, self.config.dropout, self.mesh, "embed")
        angles = None if self.rotary is None else self.rotary.table(stream.positions, x.dtype)
        for number, block in enumerate(self.blocks):
            here = _for_block(stream, number)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, here, angles, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, here, angles)
        return self.norm(x)  # type: ignore[no-any-return]

    def _stream(
        self, places: Places, tokens: Tensor, key: Key | None, samples: Tensor | None, documents: Tensor | None
    ) -> Stream:
        """Of the tokens this cp rank holds. Pads are at the end of sequences, which no causal position can see."""
        part, device = self.mesh.index("cp"), tokens.device
        starts = None if documents is None else document_starts(places.pad(documents, -1))
        positions = torch.arange(places.padded, device=device).expand(len(tokens), -1)
        if starts is not None:
            positions = positions - starts
        if self.positions is not None:  # pads may lie beyond the last learned position; nothing sees what they get
            positions = positions.clamp(max=self.config.max_positions - 1)
        ids = None if samples is None else token_ids(samples, places.padded).view(len(tokens), -1)
        return Stream(
            len(tokens),
            places.local,
            places.shard(positions, part).reshape(-1),
            None if ids is None else places.shard(ids, part).reshape(-1),
            key,
            places,
            starts,
        )

    def _check(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        documents: Tensor | None,
        key: Key | None,
        samples: Tensor | None,
    ) -> None:
        config, where = self.config, self.mesh.where()
        given = {"tokens": tokens, "labels": labels, "documents": documents}
        shapes = {name: tuple(t.shape) for name, t in given.items() if t is not None}
        if tokens.dim() != 2 or len(set(shapes.values())) > 1:
            raise ModelError(
                "IG410",
                "tokens, labels and documents must be [batch, sequence]",
                seen=", ".join(f"{name} {shape}" for name, shape in shapes.items()),
                expected="two dimensions, the same for all",
                where=where,
            )
        if self.mesh.size("cp") > 1 and not self._compared:
            refuse_unlike(self.mesh, tokens, labels, documents)
            self._compared = True
        if self.positions is not None and tokens.shape[1] > config.max_positions:
            raise ModelError(
                "IG411",
                "the sequence is longer than the learned positions",
                seen=tokens.shape[1],
                expected=f"at most {config.max_positions}",
                where=where,
            )
        if config.sliding_window is not None and tokens.shape[1] > config.sliding_window:
            raise ModelError(
                "IG412",
                "sliding-window attention is not built for sequences longer than the window",
                seen=f"{tokens.shape[1]} tokens",
                expected=f"at most {config.sliding_window}",
                where=where,
            )
        dropping = self.training and (config.dropout or config.attention_dropout)
        if dropping and labels is not None and (key is None or samples is None):
            raise ModelError(
                "IG413", "dropout without key and samples would differ between layouts",
                seen=f"dropout {config.dropout}, attention_dropout {config.attention_dropout}, key {key}",
                expected="model(tokens, labels, key=isograd.random.key(seed, step), samples=ids)",
                fix="pass both, or call model.eval()", where=where,
            )  # fmt: skip


def _for_block(stream: Stream, number: int) -> Stream:
    """Each block draws its own dropout."""
    if stream.key is None:
        return stream
    return replace(stream, key=stream.key.fold("block", number))


def _refuse_unbuilt(mesh: Mesh) -> None:
    waiting = [f"{axis}{mesh.size(axis)}" for axis in ("pp",) if mesh.size(axis) > 1]
    waiting += [f"ep{mesh.layout.ep}"] if mesh.layout.ep > 1 else []
    if waiting:
        raise ModelError(
            "IG400",
            f"the transformer of this version does not run {', '.join(waiting)}",
            seen=str(mesh.layout),
            expected="a layout of dp, cp, tp, sp and zero",
            fix="leave those axes out; README.md lists which layouts are built and tested",
            where=mesh.where(),
        )
