"""One decoder whose options are data: GPT-2, GPT-NeoX, Llama, Mistral, SmolLM, Qwen 2 and 3 are configs of it.

Inside, tokens are one flattened stream x [tokens, hidden]. No collective is called here: layers enter and leave
tensor-parallel regions, and the layout decides what that means.

Under cp, every rank of a cp group is given the SAME whole sequences and takes its own part of each. Labels are aligned
with tokens and are cut with them, so no target is lost at a border. Loss and count are those of this rank's own labels:
the engine's sum over 'dp cp' makes one mean of all, and nothing is divided by cp.

Under pp each rank makes only the blocks of its stages, under the names that they have on one device. A tied weight is
held by the first and the last stage, and its gradient is the sum of both. engine.train_step runs the stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from isograd.core import rng
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import ModelError
from isograd.models.config import TransformerConfig, split_by_cost
from isograd.nn import (
    MLP,
    Attention,
    Head,
    LayerNorm,
    LearnedPositions,
    MoE,
    RMSNorm,
    Rotary,
    Stream,
    VocabEmbedding,
)
from isograd.nn.loss import CHUNK, IGNORE
from isograd.nn.parameter import FactoryKwargs
from isograd.nn.routing import Remembered
from isograd.nn.stream import Cache, token_ids
from isograd.pipeline.split import ranges
from isograd.pipeline.stages import pieces
from isograd.sequence import TokenLayout, document_starts, gather_whole, refuse_unlike, token_layout_for
from isograd.sequence.whole import document_bounds

Angles = tuple[Tensor, Tensor] | None

# What recompute="selective" keeps: results of products and of attention's kernels, but in a ring, which adds to them.
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]
KERNELS = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def norm_of(config: TransformerConfig) -> Callable[..., nn.Module]:
    """The class of a config's norms on the residual stream."""
    return RMSNorm if config.norm == "rms" else LayerNorm


class Block(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(x)); or both on the same x (parallel residual). In the layers that the
    config says, experts take the place of the mlp."""

    def __init__(
        self,
        config: TransformerConfig,
        number: int,
        mesh: Mesh,
        rotary: Rotary | None,
        key: Key,
        made: FactoryKwargs,
    ) -> None:
        super().__init__()
        out_std = config.init_std / (2 * config.layers) ** 0.5  # the residual sum keeps its scale at any depth
        norm = partial(norm_of(config), config.hidden, mesh, eps=config.norm_eps, **made)
        self.mesh, self.drop, self.parallel = mesh, config.dropout, config.parallel_residual
        self.norm1 = norm()
        self.attention = Attention(
            config, mesh, key=key.fold("attention"), window=config.window_of(number), rotary=rotary, out_std=out_std,
            **made,
        )  # fmt: skip
        self.norm2 = norm()
        about: dict[str, Any] = {
            "activation": config.activation, "gated": config.gated, "std": config.init_std, "out_std": out_std,
            **made,
        }  # fmt: skip
        self.mlp: MLP | MoE
        if config.experts is not None and config.has_experts(number):
            name = f"blocks.{number}.mlp"
            self.mlp = MoE(config.hidden, config.experts, mesh, key=key.fold("mlp"), name=name, **about)
        else:
            self.mlp = MLP(config.hidden, config.mlp, mesh, key=key.fold("mlp"), bias=config.mlp_bias, **about)

    def not_compilable(self) -> str:
        """Why torch.compile would cut this block to pieces; empty: it makes one graph of it."""
        if self.drop or self.attention.dropout:
            return "dropout: each mask's key is hashed in Python"
        if isinstance(self.mlp, MoE):
            return "experts: the host waits for how many tokens each has"
        return "a window: its attention is computed block by block" if self.attention.window is not None else ""

    def forward(self, x: Tensor, stream: Stream, angles: Angles) -> Tensor | tuple[Tensor, Tensor | None]:
        """The residual stream in and out; of a block with experts, also the sums of their losses (MoE.forward)."""
        attended = self.attention(self.norm1(x), stream, angles)
        attended = stream.dropout(attended, self.drop, self.mesh, "attention out")
        base = x if self.parallel else x + attended
        normed, has_experts = self.norm2(base), isinstance(self.mlp, MoE)
        fed, sums = self.mlp(normed, stream) if has_experts else (self.mlp(normed), None)
        fed = stream.dropout(fed, self.drop, self.mesh, "mlp out")
        out = base + attended + fed if self.parallel else base + fed
        return (out, sums) if has_experts else out


class Transformer(nn.Module):
    """A decoder, whole or this rank's stages of it, under any layout."""

    cuts_batches = True  # each rank of a cp group is given the whole batch, of which the model takes its part

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        *,
        seed: int = 0,
        split: Sequence[int] | None = None,
        ignore_index: int = IGNORE,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        """Weights are a function of (seed, name, global index): the same model under every layout.

        split: the number of blocks in each of the pp * vpp stages; by default, stages of about equal cost.
        ignore_index: the label of positions without a target.
        """
        super().__init__()
        if not isinstance(config, TransformerConfig) or not isinstance(mesh, Mesh):
            raise ModelError("IG418", seen=f"Transformer({type(config).__name__}, {type(mesh).__name__})")
        if mesh.layout.ep > 1 and config.experts is None:
            raise ModelError("IG400", seen=str(mesh.layout), ep=mesh.layout.ep, where=mesh.describe_rank())
        self.config, self.mesh = config, mesh
        layout = mesh.layout
        stages = layout.pp * layout.vpp
        self.parts = ranges(split or split_by_cost(config, stages, layout.pp), stages, config.layers)
        mine = range(mesh.index("pp"), stages, layout.pp)
        first, last = 0 in mine, stages - 1 in mine
        self.recompute = False
        self.loss_chunk = CHUNK
        self.ignore_index = ignore_index
        self._compared = False  # whether the ranks of a cp group have once compared the sequences they were given
        key = rng.key(seed, "transformer")
        learned = config.positions == "learned"
        self.rotary = None if learned else Rotary(config.rotary_dims, config.rope_theta, config.rope_scaling)
        std = config.init_std
        self.embed = self.positions = self.norm = self.head = self.score = None
        ties = config.tied and not config.score
        if first or (last and ties):
            tie = (f"pp:0+{layout.pp - 1}",) if ties and layout.pp > 1 else ()
            self.embed = VocabEmbedding(
                config.vocab, config.hidden, mesh, key=key.fold("embed"), std=std, partial_over=tie,
                padding=config.pad_token, **made,
            )  # fmt: skip
        if first and learned:
            self.positions = LearnedPositions(
                config.max_positions, config.hidden, mesh, key=key.fold("positions"), std=std, **made
            )
        self.blocks = nn.ModuleList()
        for number in (number for stage in mine for number in self.parts[stage]):
            block = Block(config, number, mesh, self.rotary, key.fold("block", number), made)
            self.blocks.add_module(str(number), block)  # the number it has on one device
        if last:
            self.norm = norm_of(config)(config.hidden, mesh, eps=config.norm_eps, **made)
            tied = self.embed.weight if self.embed is not None and ties else None
            head = partial(Head, hidden=config.hidden, mesh=mesh, std=std, ignore_index=ignore_index, **made)
            if config.score:
                self.score = head(vocab=1, key=key.fold("score"))
            else:
                self.head = head(vocab=config.vocab, key=key.fold("head"), tied=tied)

    @property
    def recompute(self) -> bool | str:
        """True: blocks keep only their input and run again in backward. "selective": they keep the results of matrix
        products and of attention, too, and the rest runs again. "offload": True, and the inputs are kept in the host's
        memory, from where backward fetches each before its block. On the CPU that is the same as True.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, how: bool | str) -> None:
        if how not in (False, True, "selective", "offload"):
            raise self._no_such("recompute", how, "False, True, 'selective' or 'offload'")
        if how == "offload" and self.mesh.device.type == "cpu" and self.mesh.rank == 0:
            warnings.warn("recompute='offload' is recompute=True on the CPU: it has no second memory", stacklevel=2)
        self._recompute = how

    @property
    def loss_chunk(self) -> int | None:
        """The number of tokens whose logits exist at a time, with their gradients; None: of all tokens at once."""
        return self._loss_chunk

    @loss_chunk.setter
    def loss_chunk(self, tokens: int | None) -> None:
        if tokens is not None and tokens < 1:
            raise self._no_such("loss_chunk", tokens, "a positive number of tokens, or None")
        self._loss_chunk = tokens

    def _no_such(self, option: str, seen: object, expected: str) -> ModelError:
        text = f"{option} of the transformer cannot be {seen!r}"
        return ModelError("IG416", text, seen=repr(seen), expected=expected, where=self.mesh.describe_rank())

    def compile_blocks(self, backend: str = "inductor") -> dict[str, str]:
        """Compile each block by torch.compile; alike ones share a graph, which the first step makes. Returns why the
        others are left as they are, by name. A message of tp or cp ends one graph, and another begins after it."""
        left = {}
        for number, block in self.blocks.named_children():
            assert isinstance(block, Block)
            reason = block.not_compilable()
            if reason:
                left[f"blocks.{number}"] = reason
            else:
                block.compile(backend=backend)
        return left

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        key: Key | None = None,
        samples: Tensor | None = None,
        documents: Tensor | None = None,
        stage: int | None = None,
        passed: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """tokens [b, s] of this dp rank. With labels [b, s]: (mean loss, count); without: logits [b, s, vocab].

        Dropout needs `key`, new in every micro-batch and step, and `samples`, the global ids [b] of the sequences.
        documents [b, s] packs several texts into one sequence: a new text begins where the number changes; it sees
        nothing of the texts before it, and its positions start at 0.

        A pipeline calls one `stage` at a time, with the stream that the previous stage `passed` on.

        cache: {} at first, which each call fills: tokens are those behind the ones of the calls before (one, but for
        the first call), and the result is the last one's logits [b, vocab]. In eval mode, without cp, sp and pp.
        """
        if stage is None and len(self.parts) > 1:
            raise ModelError(
                "IG415", seen=f"a forward under {str(self.mesh.layout)!r}", where=self.mesh.describe_rank()
            )
        if cache is not None:
            assert self.head is not None
            x, _, _ = self._through(0, None, tokens, None, key=None, samples=None, documents=None, cache=cache)
            return self.head.logits(x.view(*tokens.shape, -1)[:, -1])
        stage = stage or 0
        x, stream, terms = self._through(stage, passed, tokens, labels, key=key, samples=samples, documents=documents)
        if stage < len(self.parts) - 1:
            return (x, Terms(**terms)) if terms else x
        assert stream.places is not None
        if labels is not None:
            loss = self._loss(x, self._local_labels(labels, stream.places), tokens, documents)
            return Terms(lm=loss, **terms) if self._has_terms else loss
        head = self.score or self.head
        assert head is not None
        return gather_whole(head.logits(x).view(stream.batch, stream.length, -1), self.mesh, stream.places)

    @property
    def chunks(self) -> dict[int, Callable[[Any, Any], Any]]:
        """This rank's stages by number, as functions of (what the previous stage passed on, micro-batch)."""
        return pieces(self, self.mesh)

    def _loss(self, x: Tensor, labels: Tensor, tokens: Tensor, documents: Tensor | None) -> Any:
        """(mean, count) of this rank's labels, from the last norm's output; tokens, documents: of whole rows."""
        assert self.head is not None
        return self.head(x, labels, self.loss_chunk)

    def _through(
        self,
        stage: int,
        x: Tensor | None,
        tokens: Tensor,
        labels: Tensor | None,
        *,
        key: Key | None,
        samples: Tensor | None,
        documents: Tensor | None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Stream, dict[str, tuple[Tensor, float, float]]]:
        """Through the blocks of one stage, and of the last one its norm; where tokens lie, and the experts' terms."""
        self._check(tokens, labels, documents, key, samples)
        places, part = token_layout_for(tokens.shape[1], len(tokens), self.mesh), self.mesh.index("cp")
        stream = self._stream(places, tokens, key if self.training else None, samples, documents)
        if cache is not None:
            before = next(iter(cache.values()))[0].shape[1] if cache else 0
            stream = replace(stream, positions=stream.positions + before, cache=cache)
        if stage == 0:
            assert self.embed is not None
            x = self.embed(places.shard(tokens, part).reshape(-1))
            x = x if self.positions is None else self.positions(x, stream)
            x = stream.dropout(x, self.config.dropout, self.mesh, "embed")
        assert x is not None
        x, sums = self._body(x, stream, self.parts[stage])
        if stage == len(self.parts) - 1:
            assert self.norm is not None
            x = self.norm(x)
        return x, stream, self._expert_terms(sums, _tokens_of(places, len(tokens), part))

    def _local_labels(self, labels: Tensor, places: TokenLayout) -> Tensor:
        """This cp rank's part of the labels, flattened."""
        return places.shard(labels, self.mesh.index("cp"), self.ignore_index).reshape(-1)

    def _body(self, x: Tensor, stream: Stream, numbers: range) -> tuple[Tensor, list[Tensor]]:
        """Through these blocks; and the sums of their experts' losses."""
        angles = self.rotary.table(stream.positions, x.dtype) if self.rotary is not None and numbers else None
        found = []
        for number in numbers:
            block, here = self.blocks.get_submodule(str(number)), _for_block(stream, number)
            if self.recompute and torch.is_grad_enabled():
                here = replace(here, remembered=Remembered())
                how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
                if self.recompute == "selective":
                    kept = PRODUCTS + KERNELS * (self.mesh.layout.ring == 1)
                    how["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
                with save_on_cpu(pin_memory=x.is_cuda) if self.recompute == "offload" else nullcontext():
                    out = checkpoint(block, x, here, angles, **how)
            else:
                out = block(x, here, angles)
            x, sums = out if isinstance(out, tuple) else (out, None)
            found += [] if sums is None else [sums]
        return x, found

    @property
    def _has_terms(self) -> bool:
        """Whether the loss has terms beside that of the language model: in training only."""
        options = self.config.experts
        losing = options is not None and (options.balance != "none" or options.z_weight > 0)
        return losing and self._stages_with_experts > 0 and self.training and torch.is_grad_enabled()

    @property
    def _stages_with_experts(self) -> int:
        options = self.config.experts
        return sum(any(options.in_layer(number) for number in part) for part in self.parts) if options else 0

    def _expert_terms(self, sums: Sequence[Tensor], tokens: int) -> dict[str, tuple[Tensor, float, float]]:
        """The terms of the experts of one stage: means over the tokens routed here, summed over layers.

        Each stage gives its share of the tokens as its weight, so that all stages' weights add up to the tokens.
        """
        options = self.config.experts
        if not sums or options is None:
            return {}
        stages = self._stages_with_experts
        balance, z = torch.stack(tuple(sums)).sum(0) * (stages / max(1, tokens))
        found = {}
        if options.balance != "none":
            found["balance"] = (balance, tokens / stages, options.balance_weight)
        if options.z_weight:
            found["z"] = (z, tokens / stages, options.z_weight)
        return found

    def term_weights(
        self, tokens: Tensor, labels: Tensor | None = None, **_: object
    ) -> dict[str, Tensor | float] | None:
        """How many labels and routed tokens this rank has of a micro-batch; None: the loss has one term."""
        if labels is None or not self._has_terms:
            return None
        places, part = token_layout_for(tokens.shape[1], len(tokens), self.mesh), self.mesh.index("cp")
        routed = float(_tokens_of(places, len(tokens), part))
        options, mine = self.config.experts, self._local_labels(labels, places)
        found: dict[str, Tensor | float] = {"lm": (mine != self.ignore_index).sum()}
        assert options is not None
        found |= {"balance": routed} if options.balance != "none" else {}
        return found | ({"z": routed} if options.z_weight else {})

    def _stream(
        self, places: TokenLayout, tokens: Tensor, key: Key | None, samples: Tensor | None, documents: Tensor | None
    ) -> Stream:
        """Describe the tokens of this cp rank. Padding is at the end of sequences, where no other token sees it."""
        part, device = self.mesh.index("cp"), tokens.device
        starts = None if documents is None else document_starts(places.pad(documents, -1))
        positions = torch.arange(places.padded, device=device).expand(len(tokens), -1)
        if starts is not None:
            positions = positions - starts
        if self.config.positions == "learned":  # padding may lie beyond the last learned position
            positions = positions.clamp(max=self.config.max_positions - 1)
        ids = None if samples is None else token_ids(samples, places.padded).view(len(tokens), -1)
        positions = places.shard(positions, part).reshape(-1)
        ids = None if ids is None else places.shard(ids, part).reshape(-1)
        return Stream(len(tokens), places.local, positions, ids, key, places, starts, document_bounds(starts))

    def _check(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        documents: Tensor | None,
        key: Key | None,
        samples: Tensor | None,
    ) -> None:
        config, where = self.config, self.mesh.describe_rank()
        given = {"tokens": tokens, "labels": labels, "documents": documents}
        shapes = {name: tuple(t.shape) for name, t in given.items() if t is not None}
        if tokens.dim() != 2 or len(set(shapes.values())) > 1:
            raise ModelError("IG410", seen=", ".join(f"{name} {shape}" for name, shape in shapes.items()), where=where)
        if self.mesh.size("cp") > 1 and not self._compared:
            refuse_unlike(self.mesh, tokens, labels, documents)
            self._compared = True
        if config.positions == "learned" and tokens.shape[1] > config.max_positions:
            raise ModelError("IG411", seen=tokens.shape[1], max_positions=config.max_positions, where=where)
        dropping = self.training and (config.dropout or config.attention_dropout)
        if dropping and labels is not None and (key is None or samples is None):
            seen = f"dropout {config.dropout}, attention_dropout {config.attention_dropout}, key {key}"
            raise ModelError("IG413", seen=seen, where=where)


def _tokens_of(places: TokenLayout, rows: int, part: int) -> int:
    """The number of tokens, without padding, that a cp rank has of `rows` sequences."""
    return rows * sum(max(0, min(stop, places.length) - start) for start, stop in places.spans[part])


def _for_block(stream: Stream, number: int) -> Stream:
    """The stream with a key of its own for each block's dropout."""
    if stream.key is None:
        return stream
    return replace(stream, key=stream.key.fold("block", number))
