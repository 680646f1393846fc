"""What a model of transformers is trained to predict, and what its forward is given for it: docs/hugging.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.errors import ModelError, did_you_mean
from isograd.hf.context_parallel import SequenceCut, base_of, scores_rows, without_adapters
from isograd.hf.sub_configs import parts_of, text_of
from isograd.sequence.attend import gather_whole, token_layout_for
from isograd.sequence.token_layout import TokenLayout, document_starts

CAUSAL, MASKED, SEQ2SEQ, SCORE = "causal", "masked", "seq2seq", "score"
IGNORE = -100  # the label that does not count, as transformers has it
KEYS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")  # of a causal batch
EMBEDS = "inputs_embeds"  # [b, s, hidden], in the place of input_ids
# What a batch of the other losses may hold beside input_ids and labels.
OPTIONS = {
    MASKED: ("attention_mask", "token_type_ids", "position_ids"),
    SEQ2SEQ: ("attention_mask", "decoder_input_ids", "decoder_attention_mask"),
}


def library_of(config: Any, where: str) -> tuple[Any, str]:
    """(the library's class for a config, its loss): the class that the config names, or the first that there is."""
    found = _classes(config)
    named = [pair for pair in found if pair[0].__name__ in (getattr(config, "architectures", None) or ())]
    if not found:
        raise ModelError(
            "IG461",
            f"transformers has no language model for {type(config).__name__}",
            seen=getattr(config, "model_type", type(config).__name__),
            expected="a config with a class for causal or masked language models, for sequences to sequences, or for "
            "images and text",
            fix="for a model of another kind: under dp and zero, ig.Engine takes any module",
            where=where,
        )
    return (named or found)[0]


def library_of_model(model: Any, mesh: Mesh) -> tuple[Any, str]:
    """The same of a model that is built: a decoder may have a score in the place of its head, of a row or a token."""
    from transformers.models.auto import modeling_auto as auto

    library, loss = library_of(model.config, mesh.describe_rank())
    of_what = [auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING]
    if mesh.size("pp") == 1:  # the loss of a stage knows no score of a token
        of_what.append(auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)
    scores: list[Any] = [mapping.get(type(model.config), None) for mapping in of_what]
    return (type(model), SCORE) if loss == CAUSAL and type(model) in scores else (library, loss)


def _classes(config: Any) -> list[tuple[Any, str]]:
    from transformers.models.auto import modeling_auto as auto

    both = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, SEQ2SEQ)
    rest = [
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING, CAUSAL),
        (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, CAUSAL),
        (auto.MODEL_FOR_MASKED_LM_MAPPING, MASKED),
    ]
    whole = getattr(config, "is_encoder_decoder", False)
    wanted = [both, rest[2]] if whole else [*rest, both]
    found: list[tuple[Any, str]] = [
        (mapping[type(config)], loss) for mapping, loss in wanted if type(config) in mapping
    ]
    # A class for the text alone takes the config of the text alone, and is also listed for that of the whole.
    of_parts = {type(part) for part in parts_of(config).values()}
    return [(library, loss) for library, loss in found if library.config_class not in of_parts]


def refuse_cut_sequences(loss: str, name: str, mesh: Mesh) -> None:
    """Attention over cut sequences is causal; of scores only those of rows are taken behind it."""
    rows = loss == SCORE and name.endswith("ForSequenceClassification") and mesh.size("pp") == 1
    if loss != CAUSAL and not rows and mesh.size("cp") > 1:
        raise ModelError(
            "IG460",
            f"{name} is not cut over cp: its loss is {loss}, and attention over cut sequences is causal",
            seen=str(mesh.layout),
            expected="dp, tp, ep, pp and zero",
            fix="leave cp out",
            where=mesh.describe_rank(),
        )


@dataclass(frozen=True, eq=False)
class BatchPart:
    """One rank's part of a batch."""

    inputs: dict[str, Any]  # for model(**inputs)
    weight: Tensor  # the number of this rank's labels, which the loss is the mean of
    cut: SequenceCut

    def gather_sequence(self, x: Tensor) -> Tensor:
        """This rank's part [b, local, ...] of e.g. logits -> [b, length, ...] in order, on every cp rank."""
        return gather_whole(x, self.cut.mesh, self.cut.places)


@dataclass(eq=False)
class RowScores:
    """Hooks of a model that scores rows, which is given whole rows: its layers get this rank's part of them, and its
    head gives the scores of all tokens, of which the library takes each row's last. Every cp rank has the same loss of
    them, which enters the step once per rank."""

    mesh: Mesh
    part: BatchPart | None = None  # of the running forward

    def cut(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Of the layers: whole rows -> this rank's part."""
        given = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        # The library may take the score of a token that the mask excludes, which attends to other padding here.
        mask, ids, pad = given.get("attention_mask"), given.get("input_ids"), text_of(base.config).pad_token_id
        if mask is not None and bool((mask.eq(0) & (True if ids is None or pad is None else ids.ne(pad))).any()):
            raise ModelError(
                "IG445",
                "padding whose score would be taken for its row's",
                seen=f"tokens that attention_mask excludes, of embeddings or other than pad_token_id={pad}",
                expected="the pad token there, by which transformers finds the last token of a row",
                fix="input_ids.masked_fill(attention_mask == 0, model.config.pad_token_id)",
                where=self.mesh.describe_rank(),
            )
        self.part = shard({name: given.pop(name) for name in (*KEYS, EMBEDS) if name in given}, self.mesh)
        return (), given | self.part.inputs

    def gather(self, head: Any, args: tuple[Any, ...], scores: Tensor) -> Tensor:
        """Of the head: [b, local, n] -> [b, s, n]."""
        assert self.part is not None
        return self.part.gather_sequence(scores)


def cut_scored_rows(model: Any, mesh: Mesh) -> None:
    """Give a model that scores rows, and is attached to a mesh with cp, the hooks above."""
    if hasattr(model, "_isograd_attached") and scores_rows(model):
        hooks, (handles, _) = RowScores(mesh), model._isograd_attached
        handles.append(base_of(model).register_forward_pre_hook(hooks.cut, with_kwargs=True, prepend=True))
        handles.append(without_adapters(model).score.register_forward_hook(hooks.gather))


def shard(batch: Mapping[str, Any], mesh: Mesh, loss: str = CAUSAL) -> BatchPart:
    """This rank's part of whole sequences: inputs for the model, and the number of labels its loss is the mean of.

    It does not communicate, so it may run in a loader's thread. Labels of -100 do not count; other keys are refused.

    loss "causal": input_ids [b, s]; labels [b, s] as transformers has them, aligned with input_ids and shifted here,
    before anything is cut, or shift_labels, which are shifted already; attention_mask with padding at the END of rows
    only; position_ids: where they restart, a new document begins, which attends only to itself; inputs_embeds
    [b, s, hidden] in the place of input_ids, whose gradient is that of this rank's part.
    loss "masked": labels at their own places. loss "seq2seq": labels [b, t] that a decoder predicts.
    """
    given = {name: tensor for name, tensor in batch.items() if tensor is not None}
    if loss == CAUSAL:
        return _causal(given, mesh)
    if loss not in OPTIONS:
        raise ModelError(
            "IG444",
            f"no model has the loss {loss!r}{did_you_mean(loss, (CAUSAL, *OPTIONS))}",
            seen=repr(loss),
            expected=f"one of {(CAUSAL, *OPTIONS)}",
            fix=f"loss={CAUSAL!r}; a classifier of rows has a layout without pp",
            where=mesh.describe_rank(),
        )
    known = ("input_ids", "labels", *OPTIONS[loss])
    unknown = sorted(given.keys() - set(known))
    if unknown or not {"input_ids", "labels"} <= given.keys():
        raise ModelError(
            "IG444",
            f"a batch for the {loss} loss {'has unknown ' + ', '.join(unknown) if unknown else 'lacks a key'}"
            + (did_you_mean(unknown[0], known) if unknown else ""),
            seen=f"{sorted(given)}",
            expected=f"input_ids and labels, and any of {', '.join(OPTIONS[loss])}",
            where=mesh.describe_rank(),
        )
    tokens, labels = given["input_ids"], given["labels"]
    weight = (labels != IGNORE).sum()
    if not int(weight):  # a mean over nothing is NaN: one label, whose weight is 0
        labels = labels.clone()
        labels.view(-1)[0] = 0
    cut = SequenceCut(mesh, token_layout_for(tokens.shape[1], len(tokens), mesh), None, (tokens, given["labels"]))
    return BatchPart(
        given | {"labels": labels, "use_cache": False} if loss == SEQ2SEQ else given | {"labels": labels}, weight, cut
    )


def _causal(given: dict[str, Any], mesh: Mesh) -> BatchPart:
    _refuse_unknown(given, mesh)
    embeds: Tensor | None = given.get(EMBEDS)
    tokens = given["input_ids"] if embeds is None else embeds.new_zeros(embeds.shape[:2], dtype=torch.long)
    rows, length = tokens.shape
    places, rank = token_layout_for(length, 1, mesh), mesh.index("cp")  # under sp, tp divides the tokens of each row
    labels = torch.full_like(tokens, IGNORE)
    if "shift_labels" in given:
        labels = given["shift_labels"]
    elif "labels" in given:
        labels = F.pad(given["labels"][:, 1:], (0, 1), value=IGNORE)
    mask = given.get("attention_mask")
    if mask is not None:
        _refuse_padding(mask.bool(), labels, mesh)
    positions = given.get("position_ids", torch.arange(length, device=tokens.device).expand(rows, -1))
    starts, whole = _starts(given.get("position_ids"), mask, places, mesh), (tokens, labels, positions)
    cut = SequenceCut(mesh, places, starts, whole if embeds is None else (*whole, embeds))
    mine = places.shard(labels, rank, IGNORE).contiguous()  # transformers views labels
    weight = (mine != IGNORE).sum()
    inputs = {name: places.shard(given[name], rank) for name in ("input_ids", EMBEDS) if name in given} | {
        "position_ids": places.shard(positions, rank),
        "use_cache": False,
    }
    if "labels" in given or "shift_labels" in given:
        inputs |= {"labels": mine, "shift_labels": mine, "num_items_in_batch": weight.clamp(min=1)}
    return BatchPart(inputs | ({"isograd": cut} if places.cp > 1 else {}), weight, cut)


def _refuse_unknown(given: dict[str, Any], mesh: Mesh) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items() if isinstance(tensor, Tensor)}
    unknown = sorted(given.keys() - ({*KEYS, EMBEDS} if mesh.size("pp") == 1 else {*KEYS}))
    alike = {shape[:2] if name == EMBEDS else shape for name, shape in shapes.items()}
    if unknown or not given.keys() & {"input_ids", EMBEDS} or len(alike) != 1 or len(min(alike)) != 2:
        hint = did_you_mean(unknown[0], KEYS) if unknown else ""
        raise ModelError(
            "IG444",
            f"a batch that cannot be cut: {'unknown ' + ', '.join(unknown) if unknown else 'its shapes differ'}{hint}",
            seen=", ".join(f"{name} {shapes.get(name, '')}" for name in given),
            expected=f"input_ids [batch, sequence] and, of the same shape, any of {', '.join(KEYS[1:])}",
            where=mesh.describe_rank(),
        )


def _refuse_padding(real: Tensor, labels: Tensor, mesh: Mesh) -> None:
    """Padding at the end needs no mask, since no earlier token attends to it. Padding elsewhere is refused."""
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ModelError(
            "IG445",
            "padding that is not at the end of the rows",
            seen="an attention_mask in which a 1 follows a 0",
            expected="pads on the right, or packed documents by position_ids",
            fix="tokenizer.padding_side = 'right'",
            where=mesh.describe_rank(),
        )
    if bool((~real & (labels != IGNORE)).any()):
        raise ModelError(
            "IG445",
            "labels that padding would have to predict",
            seen="a label other than -100 after a token that attention_mask excludes",
            expected="-100 there",
            fix="labels = input_ids.masked_fill(attention_mask == 0, -100)",
            where=mesh.describe_rank(),
        )


def _starts(positions: Tensor | None, mask: Tensor | None, places: TokenLayout, mesh: Mesh) -> Tensor | None:
    """Where documents begin, if some row has several: wherever a position is not the previous one + 1."""
    if positions is None:
        return None
    anew = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    if mask is not None and bool((anew & mask.bool()).any()):
        raise ModelError(
            "IG445",
            "position_ids that restart, together with an attention_mask",
            seen="both: transformers keeps documents apart by position_ids only without a mask",
            expected="packed documents without attention_mask, or one padded document per row",
            where=mesh.describe_rank(),
        )
    if mask is not None or not bool(anew.any()):
        return None
    return document_starts(places.pad(anew.cumsum(1), -1))


def refuse_other_parts(model: Any, loss: str, mesh: Mesh) -> None:
    """A model whose labels are not shifted refuses those that were shifted for a causal one."""

    def gate(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "shift_labels" in kwargs:
            raise ModelError(
                "IG444",
                f"the labels of this part were shifted for a causal model; {type(model).__name__} has the {loss} loss",
                seen="a part of ig.hf.shard(batch, mesh)",
                expected=f"ig.hf.shard(batch, mesh, loss={loss!r})",
                where=mesh.describe_rank(),
            )

    if loss != CAUSAL:
        model.register_forward_pre_hook(gate, with_kwargs=True)


def mean_of_labels(logits: Tensor, labels: Tensor, loss: str) -> Tensor:
    """The definition: cross entropy, as a mean over the labels that count."""
    if loss == CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
