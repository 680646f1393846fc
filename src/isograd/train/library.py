"""A Hugging Face folder that `isograd train` runs by transformers' own code, and LoRA in it, under any layout.

The model that adapters are put into is frozen, and is what DPO and its kin compare with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd import hf
from isograd.comm.consensus import run_or_raise_on_all_ranks
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import ConfigError, ModelError
from isograd.hf.adapters import insert, need_peft
from isograd.hf.build import empty
from isograd.hf.loading import config_of, not_loaded, recompute_blocks
from isograd.hf.losses import shard
from isograd.hf.stages import cost_of_token
from isograd.hf.sub_configs import text_of
from isograd.hf.training_rows import (
    TrainingRows,
    library_rows,
    refuse_other_losses,
    refuse_packing,
    running,
    takes_rows,
)
from isograd.train.config import Config
from isograd.train.policy import PolicyLoss
from isograd.train.preference_model import PreferenceLoss, loss_of
from isograd.train.sections import Preference
from isograd.train.task import DTYPES


def opened(config: Config, mesh: Mesh) -> Any:
    """The model on this mesh, proven, with its adapters, and taking the rows of the run; all ranks call it."""
    library = run_or_raise_on_all_ranks(lambda: _checked(config, mesh), mesh, ModelError, not_loaded)
    model, prefers = config.model, config.pads_rows
    made: Any = hf.load(
        model.path if model.weights else library, mesh, adapter=_lora(config), dtype=DTYPES[model.dtype],
        seed=model.seed, logits=prefers, base_bits=None if config.adapter is None else config.adapter.base_bits,
    )  # fmt: skip
    if model.attn_implementation is not None:
        run_or_raise_on_all_ranks(lambda: _set_attention(made, config, mesh), mesh, ModelError, not_loaded)
    if model.recompute:
        recompute_blocks(made)
    if model.compile:
        for block in _blocks(made, library):
            block.compile()
    takes_rows(made, mesh, PreferenceRows if prefers else TrainingRows)
    if prefers:
        made.pair_loss = loss_of(config.grpo or config.preference or Preference(), mesh)
    return made


def _set_attention(model: Any, config: Config, mesh: Mesh) -> None:
    """Nothing is fetched: without its package transformers would look for a kernel on the hub."""
    wanted, seen = str(config.model.attn_implementation), ""
    if wanted == "flash_attention_2" and (mesh.device.type != "cuda" or find_spec("flash_attn") is None):
        seen = (
            f"device {mesh.device.type}, package flash_attn " + ("is" if find_spec("flash_attn") else "not") + " there"
        )
    else:
        model.set_attn_implementation(wanted)
        if model.config._attn_implementation != wanted:  # the library only warns
            seen = f"{type(model).__name__}, whose attention is {model.config._attn_implementation} and stays so"
    if seen:
        raise ModelError("IG479", seen=seen, wanted=wanted, where=mesh.describe_rank())


def _blocks(model: Any, library: Any) -> Iterable[nn.Module]:
    """The layers of a model: its first list of as many modules as its config says."""
    count = int(getattr(text_of(library), "num_hidden_layers", 0))
    lists = [found for found in model.modules() if isinstance(found, nn.ModuleList) and len(found) == count]
    return lists[0] if lists else ()


def _checked(config: Config, mesh: Mesh) -> Any:
    """The library's config, of a model that the task can train."""
    library = _causal(config, mesh)
    if not config.pads_rows and config.packing != "stream":
        refuse_packing(library, mesh)
    if config.pads_rows and getattr(text_of(library), "output_router_logits", False):
        raise ConfigError(
            "IG643", f"the balance loss of experts is not in the loss of task {config.task}",
            seen="output_router_logits true in the folder's config.json", expected="false",
            fix="set output_router_logits to false in a copy of config.json",
        )  # fmt: skip
    return library


def _causal(config: Config, mesh: Mesh) -> Any:
    """The library's config, of a model that predicts the next token."""
    library = config_of(config.model.path, mesh)
    refuse_other_losses(library, mesh)
    return library


def vocabulary(config: Config) -> int:
    """How many token ids the model has."""
    return int(text_of(_causal(config, Mesh.unbound("dp1"))).vocab_size)


def _lora(config: Config) -> Any:
    """What peft calls the config's `adapter`."""
    adapter = config.adapter
    if adapter is None:
        return None
    peft = need_peft(Mesh.unbound("dp1"))
    alpha = adapter.alpha if adapter.alpha is not None else 2.0 * adapter.rank
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.path,
    )


@dataclass(frozen=True)
class Counted:
    """What a log and the formula of memory need of a model."""

    vocab: int
    parameters: int
    trained: int
    adapted: int  # the frozen ones under adapters
    flops: float  # of a token, forward and backward, without attention
    layers: int
    hidden: int
    mlp: int


def counted(config: Config) -> Counted:
    """Of the whole model, built without memory. A frozen parameter has no gradient of its own: 4 FLOPs for its 6."""
    mesh = Mesh.unbound("dp1")
    library = _causal(config, mesh)
    model, _ = empty(library, DTYPES[config.model.dtype], mesh)
    adapter = _lora(config)
    if adapter is not None:
        insert(model, adapter, DTYPES[config.model.dtype], mesh)
    text = text_of(library)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    looked_up, head = model.get_input_embeddings(), model.get_output_embeddings()
    met = cost_of_token(model, text)
    if looked_up is not None and (head is None or head.weight is not looked_up.weight):
        met -= looked_up.weight.numel()
    adapters = trained if adapter is not None else 0
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    return Counted(
        vocab=int(text.vocab_size),
        parameters=sum(p.numel() for p in model.parameters()),
        trained=trained,
        adapted=sum(p.numel() for name, p in model.named_parameters() if name.endswith(".base_layer.weight")),
        flops=4 * (met - adapters) + 6 * adapters if adapters else 6 * met,
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        hidden=hidden,
        mlp=int(getattr(text, "intermediate_size", None) or 4 * hidden),
    )


def identity(config: Config) -> str:
    """A hash of what makes the same weights another model: the folder's config, and in how many bits they are kept."""
    values = config_of(config.model.path, Mesh.unbound("dp1")).to_dict()
    if config.adapter is not None and config.adapter.base_bits:
        values["base_bits"] = config.adapter.base_bits
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


class PreferenceRows(TrainingRows):
    """In front of a class of transformers: the loss of pairs, from whole logits."""

    pair_loss: PreferenceLoss | PolicyLoss

    def forward(
        self,
        *args: Any,
        tokens: Tensor | None = None,
        labels: Tensor | None = None,
        reference: Tensor | None = None,
        baseline: Tensor | None = None,
        samples: Tensor | None = None,
        key: Key | None = None,
        **more: Any,
    ) -> Any:
        """The loss of pairs [pairs, answers, length]; without `tokens`, the library's forward."""
        if tokens is None:
            return super().forward(*args, labels=labels, **more)
        assert labels is not None
        part = shard(library_rows(tokens.flatten(0, 1), labels.flatten(0, 1)), self._isograd_mesh)
        inputs: dict[str, Any] = dict(part.inputs)
        mine = inputs.pop("shift_labels")
        for name in ("labels", "num_items_in_batch"):
            inputs.pop(name)
        if reference is not None and reference.dim() == 3:
            reference = part.cut.places.shard(reference.flatten(0, 1), self._isograd_mesh.index("cp"))
        with running(self, key, samples):
            logits = super().forward(**inputs).logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        ignored = self.pair_loss.ignore_index
        logp = -F.cross_entropy(wide, mine.flatten(), ignore_index=ignored, reduction="none").view(mine.shape)
        return self.pair_loss.of(logp, mine != ignored, labels, reference, baseline, training=self.training)

    def term_weights(self, tokens: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor | float] | None:
        """How many pairs, and labels of chosen answers, this rank has; None: the loss has one term."""
        rows = library_rows(tokens.flatten(0, 1), labels.flatten(0, 1))
        return self.pair_loss.weights(labels, lambda: shard(rows, self._isograd_mesh).inputs["shift_labels"]) or None
