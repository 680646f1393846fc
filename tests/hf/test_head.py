"""Under tp, the logits of a training step stay cut where a model's loss allows it, and nothing else changes.

The gradients of models of both kinds are compared with one device's in test_hugging.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import isograd as ig
from isograd.comm.wire import sent_by_me
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ModelError
from isograd.hf.build import build
from isograd.hf.force_fp64 import ForceFP64
from isograd.hf.fused_head_loss import may_join
from isograd.hf.losses import library_of
from tests.hf.test_hugging import VOCAB, batch, config_of, sgd

WIDE = 3001


def refusal(do: Callable[[], Any]) -> str:
    try:
        do()
    except ModelError as error:
        return error.code
    return "none"


def seen() -> dict[str, Any]:
    """What a caller sees of models whose logits are cut, on this rank."""
    mesh, found = Mesh("tp2"), {}
    model: Any = build(config_of("gemma2"), mesh, torch.float64, noise=0.1)
    kept: Any = build(config_of("gemma2"), mesh, torch.float64, noise=0.1, logits=True)
    given = batch(0, 0, 0)
    with ForceFP64():
        ours, theirs = model(**given), kept(**given)
        found["without labels"] = torch.equal(model(given["input_ids"]).logits, theirs.logits)
        found["as a tuple"] = torch.equal(model(**given, return_dict=False)[1], theirs.logits)
        with torch.no_grad():
            found["without autograd"] = torch.equal(model(**given).logits, theirs.logits)
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * vocab_size
        found["another loss"] = torch.equal(model(**given).loss, theirs.logits.sum() * VOCAB)
    found["loss"] = abs(float(ours.loss.detach() - theirs.loss.detach())) < 1e-14
    found["as a slice"] = refusal(lambda: ours.logits[0])
    found["as a tensor"] = refusal(lambda: torch.argmax(ours.logits))
    found["by a method"] = refusal(lambda: ours.logits.argmax(-1))
    found["whole"] = tuple(theirs.logits.shape)
    return found


def test_logits_are_refused_where_they_are_cut_and_whole_everywhere_else(worlds) -> None:
    same = ("loss", "another loss", "without labels", "without autograd", "as a tuple")
    refused = ("as a slice", "as a tensor", "by a method")
    expected = {**dict.fromkeys(same, True), **dict.fromkeys(refused, "IG476"), "whole": (2, 9, VOCAB)}
    assert worlds(2).run(seen) == [expected] * 2


def work(logits: bool) -> tuple[int, int]:
    """(bytes that this rank sends, floating point operations) of the forward and backward of a micro-batch."""
    mesh = Mesh("tp2")
    model: Any = build(config_of("llama", vocab_size=WIDE), mesh, torch.float32, logits=logits)
    engine = Engine(model, mesh, sgd)
    part = ig.hf.shard(batch(0, 0, 0), mesh)
    before = sent_by_me()
    with FlopCounterMode(display=False) as counter:
        engine.backward(model(**part.inputs).loss, weight=part.weight)
    return sent_by_me() - before, counter.get_total_flops()


def both() -> tuple[tuple[int, int], tuple[int, int]]:
    return work(True), work(False)


def test_three_numbers_of_each_token_travel_in_the_place_of_its_logits_and_no_product_is_added(worlds) -> None:
    for rank, ((gathered, before), (joined, after)) in enumerate(worlds(2).run(both)):
        columns = WIDE // 2 + (rank == 0)
        assert gathered - joined == (columns - 3) * 18 * 4  # tokens, bytes of fp32
        assert before == after


def wrong_label() -> str:
    mesh = Mesh("tp2")
    model: Any = build(config_of("llama"), mesh, torch.float64)
    engine = Engine(model, mesh, sgd)
    given = batch(0, 0, 0)
    given["labels"][1, 3] = VOCAB + 2
    engine.backward(model(**given).loss, weight=8)
    try:
        engine.step()
    except ModelError as error:
        return f"{error.code} {error.seen}"
    return "accepted"


def test_a_label_outside_the_vocabulary_is_refused_on_all_ranks(worlds) -> None:
    for said in worlds(2).run(wrong_label):
        assert said.startswith("IG417")
        assert "1 labels" in said


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere2", "granite"])
def test_a_trial_finds_models_whose_loss_is_of_each_logit_by_itself(kind: str) -> None:
    config = config_of(kind)
    library, loss = library_of(config, "")
    assert may_join(library, config, loss)


def test_a_model_that_uses_its_logits_together_or_has_another_loss_gathers_them() -> None:
    config = config_of("llama")
    library, loss = library_of(config, "")

    class Normalised(library):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            given = self.loss_function
            self.loss_function = lambda logits, *rest, **more: given(logits.log_softmax(-1), *rest, **more)
            return super().forward(*args, **kwargs)

    class Other(library):  # type: ignore[misc, valid-type]
        loss_function = staticmethod(lambda logits, labels, vocab_size, **_: logits.sum())

    assert not may_join(Normalised, config, loss)
    assert not may_join(Other, config, loss)
