"""What a model of transformers is trained to predict, and what its forward is given for it.

    loss      labels                                        the loss is the mean over
    causal    those of input_ids, one place to the left     labels that count, after that shift
    masked    at their own places                           labels that count
    seq2seq   a second sequence, which a decoder predicts   labels that count

A model of images and text has the causal loss, and is trained here on text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.errors import ModelError, did_you_mean
from isograd.hugging.parts import parts_of
from isograd.mesh import Mesh
from isograd.sequence.attend import places_for
from isograd.sequence.hugging import IGNORE, Cut, Part
from isograd.sequence.hugging import shard as causal_part

CAUSAL, MASKED, SEQ2SEQ = "causal", "masked", "seq2seq"
# What a batch may hold beside input_ids and labels, which both have.
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
    """Attention over cut sequences is causal."""
    if loss != CAUSAL and mesh.size("cp") > 1:
        raise ModelError(
            "IG460",
            f"{name} is not cut over cp: its loss is {loss}, and attention over cut sequences is causal",
            seen=str(mesh.layout),
            expected="dp, tp, ep, pp and zero",
            fix="leave cp out",
            where=mesh.where(),
        )


def shard(batch: Mapping[str, Any], mesh: Mesh, loss: str = CAUSAL) -> Part:
    """This rank's part of whole sequences: inputs for the model, and the number of labels its loss is the mean of.

    loss: "causal"; "masked", with labels at their own places; or "seq2seq", with labels [b, t] that a decoder predicts.
    Labels of -100 do not count. It does not communicate, so it may run in a loader's thread.
    """
    if loss == CAUSAL:
        return causal_part(batch, mesh)
    if loss not in OPTIONS:
        raise ModelError(
            "IG444",
            f"no model has the loss {loss!r}{did_you_mean(loss, (CAUSAL, *OPTIONS))}",
            seen=repr(loss),
            expected=f"one of {(CAUSAL, *OPTIONS)}",
            where=mesh.where(),
        )
    given = {name: tensor for name, tensor in batch.items() if tensor is not None}
    known = ("input_ids", "labels", *OPTIONS[loss])
    unknown = sorted(given.keys() - set(known))
    if unknown or not {"input_ids", "labels"} <= given.keys():
        raise ModelError(
            "IG444",
            f"a batch for the {loss} loss {'has unknown ' + ', '.join(unknown) if unknown else 'lacks a key'}"
            + (did_you_mean(unknown[0], known) if unknown else ""),
            seen=f"{sorted(given)}",
            expected=f"input_ids and labels, and any of {', '.join(OPTIONS[loss])}",
            where=mesh.where(),
        )
    tokens, labels = given["input_ids"], given["labels"]
    weight = (labels != IGNORE).sum()
    if not int(weight):  # a mean over nothing is NaN: one label, whose weight is 0
        labels = labels.clone()
        labels.view(-1)[0] = 0
    cut = Cut(mesh, places_for(tokens.shape[1], len(tokens), mesh), None, (tokens, given["labels"]))
    return Part(
        given | {"labels": labels, "use_cache": False} if loss == SEQ2SEQ else given | {"labels": labels}, weight, cut
    )


def refuse_other_parts(model: Any, loss: str, mesh: Mesh) -> None:
    """A model whose labels are not shifted refuses those that were shifted for a causal one."""

    def gate(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "shift_labels" in kwargs:
            raise ModelError(
                "IG444",
                f"the labels of this part were shifted for a causal model; {type(model).__name__} has the {loss} loss",
                seen="a part of ig.hugging.shard(batch, mesh)",
                expected=f"ig.hugging.shard(batch, mesh, loss={loss!r})",
                where=mesh.where(),
            )

    if loss != CAUSAL:
        model.register_forward_pre_hook(gate, with_kwargs=True)


def mean_of_labels(logits: Tensor, labels: Tensor, loss: str) -> Tensor:
    """The definition: cross entropy, as a mean over the labels that count."""
    if loss == CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
