"""isograd's own models as cases: what `isograd verify` proves when it is given none."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isograd.core import rng
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import ConfigError
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions
from isograd.prove.case import Case
from isograd.prove.prove import verify
from isograd_verify.tell.report import Report

LAYOUTS = (
    "dp2", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2 ulysses", "cp2 ring", "pp2", "dp2 tp2 sp zero1",
    "cp2 ulysses tp2 sp", "dp2 pp2 zb zero1",
)  # fmt: skip
EXPERT_LAYOUTS = ("dp2 ep2", "tp2 ep2", "cp2 ring ep2", "dp2 tp2 sp ep4 zero1", "dp2 pp2 ep2")
LENGTH = 7
MOST_RANKS = 16

LLAMA = TransformerConfig(vocab=101, hidden=24, layers=2, heads=8, head_dim=4, mlp=41)
GPT2 = TransformerConfig(
    vocab=97, hidden=24, layers=2, heads=8, head_dim=4, mlp=37, norm="layer", activation="gelu_tanh", gated=False,
    positions="learned", max_positions=LENGTH, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, dropout=0.2,
    attention_dropout=0.2,
)  # fmt: skip
QWEN = TransformerConfig(
    vocab=101, hidden=24, layers=2, heads=8, kv_heads=2, head_dim=6, mlp=40, qk_norm=True, tied=True
)
EXPERTS = replace(
    LLAMA, kv_heads=2, experts=ExpertOptions(number=4, per_token=2, width=8, shared=8, shared_gate=True, z_weight=0.1)
)


MODELS = {"llama": LLAMA, "gpt2": GPT2, "qwen": QWEN, "experts": EXPERTS}


def language_model(config: TransformerConfig, mesh: Mesh, rows: int = 9) -> Case:
    """A decoder on random tokens in which rows have different numbers of labels, and the last has none.

    Experts keep their balance loss and z-loss. Scopes of a whole step are proven as that of a sequence, because the
    reference has one micro-batch after another; tests/parity/test_experts.py proves those.
    """
    if config.experts is not None and config.experts.balance in ("batch", "lagged"):
        config = replace(config, experts=replace(config.experts, balance="sequence"))
    window = torch.randint(config.vocab, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(7919))
    labels = window[:, 1:].clone()
    for row in range(rows):
        labels[row, : row % (LENGTH + 1)] = -100
    labels[-1] = -100
    samples = torch.arange(rows)
    batch = {"tokens": window[:, :-1].clone(), "labels": labels, "samples": samples, "key": rng.key(11)}
    return Case(Transformer(config, mesh), batch)


def how(options: Namespace, name: str = "") -> dict[str, Any]:
    """What `verify` takes of the command line's options; progress is told behind a name."""

    def say(text: str) -> None:
        print(": ".join(filter(None, ("verify", name, text))), file=sys.stderr, flush=True)

    given = {"timeout": options.timeout, "keep": options.keep, "replay_routing": options.replay_routing}
    return {"dtype": getattr(torch, options.dtype), "progress": say, **given}


def structure(config: TransformerConfig, layers: int) -> TransformerConfig:
    """A model small enough for fp64 on CPUs that a layout treats alike: its heads, ties, norms, biases, positions."""
    hidden = config.heads * 8
    config = config.with_layers(layers)
    if config.sliding_window is not None:  # shorter than the sequences of the proof
        config = replace(config, sliding_window=min(config.sliding_window, LENGTH // 2))
    if config.hidden <= hidden:
        return config
    mlp = 8 * config.heads * max(1, round(config.mlp / config.hidden))
    small = replace(config, hidden=hidden, head_dim=8, mlp=mlp, vocab=min(config.vocab, 1009))
    if small.experts is None:
        return small
    dense = min(small.experts.dense_first, layers - 1)
    return replace(
        small, experts=replace(small.experts, width=8, shared=min(small.experts.shared, 8), dense_first=dense)
    )


def prove_run(options: Namespace) -> Report:
    """What `isograd verify run.yaml` does."""
    from isograd.train.language import model_config
    from isograd.train.reading import load

    config = load(options.case).config
    model = model_config(config)
    texts = [text.strip() for text in options.layouts.split(";")] if options.layouts else [config.layout]
    if model.experts is not None and not options.layouts:
        texts += spread_experts(Layout.parse(config.layout), model.experts.number)
    layouts = [Layout.parse(text) for text in texts]
    large = [str(layout) for layout in layouts if layout.world_size > MOST_RANKS]
    if large:
        raise ConfigError("IG639", seen=large, most_ranks=MOST_RANKS)
    small = structure(model, max(2, *(layout.pp * layout.vpp for layout in layouts)))
    rows = 1 + max(layout.dp * 2 * layout.pp for layout in layouts)
    return verify(
        partial(language_model, small, rows=max(9, rows)),
        texts,
        **how(options, options.case),
    )


def spread_experts(layout: Layout, number: int) -> list[str]:
    """The layout with the largest ep that deals out so many experts, if it has none."""
    ranks = layout.dp * layout.cp * layout.tp
    fits = [ep for ep in range(2, ranks + 1) if ranks % ep == number % ep == 0]
    fits = [ep for ep in fits if ep % layout.tp == 0 or layout.tp % ep == 0]
    return [str(replace(layout, ep=fits[-1]))] if fits and layout.ep == 1 else []


def prove(options: Namespace) -> Report:
    """What `isograd verify` does without a case, or with a run's config."""
    if options.case is not None:
        return prove_run(options)
    asked = [text.strip() for text in options.layouts.split(";")] if options.layouts else []
    whole = Report(f"isograd's own models against one device, {options.dtype}")
    for name, model in MODELS.items():
        layouts = asked or (EXPERT_LAYOUTS if name == "experts" else LAYOUTS)
        # A ring refuses dropout of attention probabilities (IG408), which the GPT-2 here has.
        fits = [text for text in layouts if asked or name != "gpt2" or "ring" not in text]
        fits = [text for text in fits if name == "experts" or Layout.parse(text).ep == 1]
        if not fits:
            continue
        keep = Path(options.keep) / name if options.keep else None
        report = verify(partial(language_model, model), fits, **how(options, name) | {"keep": keep})
        for subject in report.subjects:
            subject.name = f"{name} {subject.name}"
        whole.subjects += report.subjects
    return whole
