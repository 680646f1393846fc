"""What a model was given is known by name and content: positional, by keyword, in dicts, and the labels of its loss."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.compare.compare import compare
from isograd_verify.compare.same_data import LABELS as LABELS_OF_LOSS
from isograd_verify.compare.same_data import Content, contents, lost_at_borders, same_data
from isograd_verify.errors import VerifyError
from isograd_verify.record.recording import Recording, write_json
from isograd_verify.tell.findings import NOTE, PASS
from isograd_verify.watch.capture import Capture
from isograd_verify.watch.given import described, named

from .recordings import Step, numbers, write

IDS = torch.arange(24).reshape(4, 6) % 23 + 1  # no zeros: they are padding
MASK = torch.ones(4, 6, dtype=torch.long)


class Model(nn.Module):
    """Called as transformers' models are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 5), nn.Linear(5, 24)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Tensor:
        return self.head(self.embed(input_ids))


class DataParallel(nn.Module):
    """A shell, by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        return self.module(*inputs, **kwargs)


class Batches(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch["input_ids"]


# -- names ---------------------------------------------------------------------------------------------------------

BATCH = {"input_ids": IDS, "attention_mask": MASK}
CALLS: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {
    "by place": (Model(), (IDS, MASK), {}),
    "by keyword": (Model(), (), BATCH),
    "both": (Model(), (IDS,), {"attention_mask": MASK}),
    "through a wrapper": (DataParallel(Model()), (IDS,), {"attention_mask": MASK}),
    "a dict": (Batches(), (BATCH,), {}),
    "a mapping that is no dict": (Batches(), (UserDict(BATCH),), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_has_one_name_however_it_is_given(name: str) -> None:
    module, args, kwargs = CALLS[name]
    found = named(module, args, kwargs)
    assert list(found) == ["input_ids", "attention_mask"]
    assert found["input_ids"] is IDS
    assert found["attention_mask"] is MASK


def test_tensors_in_nests_are_all_named() -> None:
    nest = {"pixels": [IDS, {"deep": MASK}], "scale": 3, "none": None}
    assert list(named(Model(), (IDS,), {"nest": nest, "labels": MASK})) == ["input_ids", "pixels.0", "deep", "labels"]
    twice = named(Model(), (IDS,), {"first": {"x": IDS}, "second": {"x": MASK}})
    assert list(twice) == ["input_ids", "x", "second.x"]


def test_what_does_not_fit_forward_s_parameters_is_named_by_its_place() -> None:
    assert list(named(Batches(), (IDS, MASK), {"more": IDS})) == ["0", "1", "more"]


def test_sparse_empty_and_nested_tensors_have_no_hash() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    given = {"a": torch.eye(3).to_sparse(), "b": torch.zeros(0, 3), "c": nested, "d": torch.ones(2, dtype=torch.bool)}
    assert list(described(named(Model(), (IDS,), given))) == ["input_ids", "d"]


# -- two runs ------------------------------------------------------------------------------------------------------


def train(home: Path, batches: list[dict[str, Tensor]], labels: list[Tensor]) -> Recording:
    """One step over micro-batches that are given by keyword; the loss is summed over labels that count."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = sum(int((part != -100).sum()) for part in labels)
    with Capture(home, steps=1):
        for batch, part in zip(batches, labels, strict=True):
            (F.cross_entropy(model(**batch).flatten(0, 1), part.flatten(), reduction="sum") / count).backward()
        optimizer.step()
    write_json(home / "recording.json", {"version": 1, "layout": "1"})
    return Recording(home)


LABELS = IDS.roll(-1, 1).masked_fill(torch.arange(6) == 5, -100)


@pytest.fixture
def whole(tmp_path: Path) -> Recording:
    return train(tmp_path / "whole", [BATCH], [LABELS])


def halves(ids: Tensor = IDS, mask: Tensor = MASK) -> list[dict[str, Tensor]]:
    return [{"input_ids": i, "attention_mask": m} for i, m in zip(ids.split(2), mask.split(2), strict=True)]


def test_keyword_inputs_and_labels_are_recorded_by_name(whole: Recording) -> None:
    found = contents(whole)
    assert {name: c.count for name, c in found.items()} == {
        "input_ids": 24, "attention_mask": 24, "labels of the loss": 20
    }  # fmt: skip


def test_the_same_batch_in_micro_batches_is_compared(whole: Recording, tmp_path: Path) -> None:
    subject = compare(whole, train(tmp_path / "halves", halves(), list(LABELS.split(2))))
    assert (subject.verdict, subject.findings) == (PASS, [])


def test_other_inputs_given_by_keyword_are_refused(whole: Recording, tmp_path: Path) -> None:
    other = IDS.clone()
    other[3, 4] = 17
    with pytest.raises(VerifyError, match="IG722") as error:
        compare(whole, train(tmp_path / "other", halves(other), list(LABELS.split(2))))
    assert "input_ids: hashes" in str(error.value)


def test_other_labels_are_refused(whole: Recording, tmp_path: Path) -> None:
    other = LABELS.clone()
    other[1, 2] = 17
    with pytest.raises(VerifyError, match="labels of the loss: hashes"):
        compare(whole, train(tmp_path / "other", halves(), list(other.split(2))))


@pytest.mark.parametrize("filler", [0, 21])
@pytest.mark.parametrize("left", [False, True])
def test_padding_to_other_lengths_is_told_and_compared(tmp_path: Path, filler: int, left: bool) -> None:
    """The first two rows are shorter: alone they need no padding."""

    def padded(rows: Tensor, value: int) -> Tensor:
        return F.pad(rows, (2, 0) if left else (0, 2), value=value)

    ids, labels = IDS.split(2), list(LABELS.split(2))
    short = ids[0][:, 2:], MASK[:2, 2:], labels[0][:, 2:]
    together = {
        "input_ids": torch.cat([padded(short[0], filler), ids[1]]),
        "attention_mask": torch.cat([padded(short[1], 0), MASK[2:]]),
    }
    apart = [{"input_ids": short[0], "attention_mask": short[1]}, {"input_ids": ids[1], "attention_mask": MASK[2:]}]
    one = train(tmp_path / "one", [together], [torch.cat([padded(short[2], -100), labels[1]])])
    subject = compare(one, train(tmp_path / "two", apart, [short[2], labels[1]]))
    assert subject.verdict == PASS
    assert [(f.verdict, f.sentence) for f in subject.findings] == [
        (NOTE, "data: input_ids: the same but for padding (4 elements more there)"),
        (NOTE, "data: attention_mask: the same but for padding (4 elements more there)"),
    ]


@pytest.mark.parametrize(
    ("tokens", "labels", "world", "lost"),
    [
        (24, 17, 2, 3),  # of 20 labels in 4 rows, each cut once
        (48, 34, 4, 3),  # two ranks share each part
        (24, 15, 2, 0),  # more than there are cuts: other labels
        (24, 21, 2, 0),  # more labels than there are
        (24, 17, 1, 0),  # nothing is cut
        (36, 17, 4, 0),  # the tokens are not the same
    ],
)
def test_labels_that_cuts_can_have_cost_are_counted(tokens: int, labels: int, world: int, lost: int) -> None:
    theirs = {"tokens": Content(count=24, rows=4), LABELS_OF_LOSS: Content(count=20)}
    ours = {"tokens": Content(count=tokens), LABELS_OF_LOSS: Content(count=labels)}
    assert lost_at_borders(theirs, ours, {name: name for name in ours}, world) == lost


def given(home: Path, *ranks: list[dict[str, Tensor]]) -> Recording:
    return write(home, [[Step({}, list(inputs))] for inputs in ranks])


ROWS = numbers(6, 5, seed=3)
PLACES = torch.arange(5).expand(6, 5).contiguous()
TABLE = torch.randn(9, 4).double()
SAME: dict[str, tuple[list[list[dict[str, Tensor]]], list[str]]] = {
    "rows over ranks, a table for all": ([[{"x": ROWS[:4], "table": TABLE}], [{"x": ROWS[4:], "table": TABLE}]], []),
    "sequences over ranks": ([[{"x": ROWS[:, :2], "table": TABLE}], [{"x": ROWS[:, 2:], "table": TABLE}]], []),
    "copies over tp": ([[{"x": ROWS, "table": TABLE}], [{"x": ROWS, "table": TABLE}]], []),
    "rows that are zeros": (
        [[{"x": ROWS[:4]}], [{"x": torch.cat([ROWS[4:], torch.zeros(1, 5).double()])}]],
        ["x: the same but for padding (5 elements more here)"],
    ),
    "positions of its own": (
        [[{"x": ROWS[:, :2], "positions": PLACES[:, :2]}], [{"x": ROWS[:, 2:], "positions": PLACES[:, :3]}]],
        ["positions: differs between the runs, as what a layout makes for itself may"],
    ),
    "another precision": (
        [[{"x": ROWS.bfloat16()}], []], ["x: in float64 there and in bfloat16 here, so they cannot be compared"]
    ),
    "a count of its own": ([[{"x": ROWS[:1], "n": torch.tensor(1)}], [{"x": ROWS[1:], "n": torch.tensor(5)}]], []),
    "another name": ([[{"tokens": ROWS[:4]}], [{"tokens": ROWS[4:]}]], []),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_layouts_that_spread_one_batch_are_never_refused(tmp_path: Path, name: str) -> None:
    whole = {"x": ROWS, "table": TABLE, "positions": PLACES, "n": torch.tensor(6)}
    ranks, said = SAME[name]
    found = same_data(given(tmp_path / "one", [whole]), given(tmp_path / "two", *ranks))
    assert [f.sentence for f in found] == [f"data: {sentence}" for sentence in said]


OTHER: dict[str, list[list[dict[str, Tensor]]]] = {
    "a row twice": [[{"x": ROWS[:4]}], [{"x": ROWS[3:]}]],
    "another table": [[{"x": ROWS[:4], "table": TABLE + 1}], [{"x": ROWS[4:], "table": TABLE + 1}]],
    "another name and other data": [[{"tokens": ROWS[:4]}], [{"tokens": ROWS[:2]}]],
}


@pytest.mark.parametrize("name", OTHER)
def test_other_data_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(VerifyError, match="IG722"):
        same_data(given(tmp_path / "one", [{"x": ROWS, "table": TABLE}]), given(tmp_path / "two", *OTHER[name]))


# -- transformers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model() -> Iterator[Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )

    def make() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()  # type: ignore[no-any-return]

    yield make


def test_data_of_transformers_models_are_compared(language_model: Callable[[], nn.Module], tmp_path: Path) -> None:
    def run(name: str, *batches: dict[str, Tensor]) -> Recording:
        model = language_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        with Capture(tmp_path / name, steps=1):
            for batch in batches:
                model(**batch, num_items_in_batch=count).loss.backward()
            optimizer.step()
        write_json(tmp_path / name / "recording.json", {"version": 1, "layout": "1"})
        return Recording(tmp_path / name)

    rows = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    parts = [{key: t[a:b] for key, t in rows.items()} for a, b in ((0, 3), (3, 4))]
    one = run("one", rows)
    assert list(contents(one)) == ["input_ids", "attention_mask", "labels", "labels of the loss"]
    assert compare(one, run("parts", *parts)).findings == []
    with pytest.raises(VerifyError, match="labels"):
        compare(one, run("other labels", parts[0], parts[1] | {"labels": IDS[2:3]}))
    with pytest.raises(VerifyError, match="IG722: the two runs saw different data"):
        compare(one, run("other ids", parts[0], parts[1] | {"input_ids": IDS[2:3]}))
