"""One decoder whose options are data: GPT-2, GPT-NeoX, Llama, Qwen 3, Mistral and SmolLM are configs of it.

    model = Transformer(config, mesh)
    loss, count = model(tokens, labels)        # labels[i] is what position i should predict; -100 does not count
    logits = model(tokens)

Inside, tokens are one flattened stream x [tokens, hidden]. No collective is named here: layers enter and leave
tensor-parallel regions, and the layout decides what that costs.
"""

from __future__ import annotations

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
    def forward(self, tokens: Tensor, labels: None = None) -> Tensor: ...

    @overload
    def forward(
        self, tokens: Tensor, labels: Tensor, *, key: Key | None = None, samples: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, *, key: Key | None = None, samples: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens [b, s] of this data rank. With labels [b, s]: (mean loss, count); without: logits [b, s, vocab].

        Dropout needs `key`, new in every micro-batch and step, and `samples`, the global ids [b] of the sequences.
        """
        self._check(tokens, labels, key, samples)
        length = tokens.shape[1]
        tokens, labels = self._padded(tokens, labels)
        stream = self._stream(tokens, key if self.training else None, samples)
        x = self._body(tokens.reshape(-1), stream)
        if labels is not None:
            return self.head(x, labels.reshape(-1))  # type: ignore[no-any-return]
        return self.head.logits(x).view(*tokens.shape, -1)[:, :length]

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

    def _padded(self, tokens: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Under sp the stream is cut into equal shards: pad the end of sequences, which no causal position can see."""
        batch, length = tokens.shape
        parts = self.mesh.size("tp") if self.mesh.layout.sp else 1
        extra = next(n for n in range(parts) if batch * (length + n) % parts == 0)
        if extra:
            tokens = nn.functional.pad(tokens, (0, extra))
            labels = None if labels is None else nn.functional.pad(labels, (0, extra), value=IGNORE)
        return tokens, labels

    def _stream(self, tokens: Tensor, key: Key | None, samples: Tensor | None) -> Stream:
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device)
        if self.positions is not None:  # pads may lie beyond the last learned position; nothing sees what they get
            positions = positions.clamp(max=self.config.max_positions - 1)
        ids = None if samples is None else token_ids(samples, length)
        return Stream(batch, length, positions.repeat(batch), ids, key)

    def _check(self, tokens: Tensor, labels: Tensor | None, key: Key | None, samples: Tensor | None) -> None:
        config, where = self.config, self.mesh.where()
        if tokens.dim() != 2 or (labels is not None and labels.shape != tokens.shape):
            seen = f"tokens {tuple(tokens.shape)}, labels {None if labels is None else tuple(labels.shape)}"
            raise ModelError(
                "IG410",
                "tokens and labels must be [batch, sequence]",
                seen=seen,
                expected="two dimensions, the same for both",
                where=where,
            )
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
    return Stream(stream.batch, stream.length, stream.positions, stream.ids, stream.key.fold("block", number))


def _refuse_unbuilt(mesh: Mesh) -> None:
    waiting = [f"{axis}{mesh.size(axis)}" for axis in ("cp", "pp") if mesh.size(axis) > 1]
    waiting += [f"ep{mesh.layout.ep}"] if mesh.layout.ep > 1 else []
    if waiting:
        raise ModelError(
            "IG400",
            f"the transformer of this version does not run {', '.join(waiting)}",
            seen=str(mesh.layout),
            expected="a layout of dp, tp, sp and zero",
            fix="leave those axes out; README.md lists which layouts are built and tested",
            where=mesh.where(),
        )
