"""What a batch holds, against the plainest reading of the files; and that it depends on its number alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.data import Mixture, Source, Tokens, build
from isograd.errors import DataError
from isograd.launcher.launch import World
from tests.data.toys import toy, whole

LENGTH, BATCH = 16, 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("tokens")
    return [toy(home / f"toy{seed}", 60 + 31 * seed, seed) for seed in range(3)]


def read(folders: list[Path], **options: Any) -> Mixture:
    weights = options.pop("weights", [1.0] * len(folders))
    sources = [Source(folder, weight) for folder, weight in zip(folders, weights, strict=True)]
    return Mixture(sources, **{"length": LENGTH, "batch": BATCH, "seed": 3} | options)


def naive(folder: Path, start: int, length: int, packing: str, split: str = "train") -> dict[str, list[int]]:
    """A window by the definition: each token, the one after it, and -100 where that belongs to another document."""
    tokens, numbers = whole(folder, split)
    row: dict[str, list[int]] = {"tokens": [], "labels": [], "documents": []}
    for place in range(start, start + length):
        inside, followed = place < len(tokens), place + 1 < len(tokens)
        row["tokens"].append(tokens[place] if inside else 0)
        same = followed and (packing == "stream" or numbers[place] == numbers[place + 1])
        row["labels"].append(tokens[place + 1] if same else -100)
        row["documents"].append((numbers[place] if inside else numbers[-1] + 1) - numbers[start])
    return row


@pytest.mark.medium
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("packing", ["documents", "stream"])
@pytest.mark.parametrize("length", [1, 2, 16, 37, 10_000])
def test_rows_are_what_a_plain_reading_of_the_files_gives(
    folders: list[Path], packing: str, length: int, split: str
) -> None:
    mixture = read(folders[:2], length=length, packing=packing, split=split)
    for step in (0, 1, 7):
        rows = mixture.rows(step, range(BATCH))
        assert set(rows) == {"tokens", "labels", "samples"} | ({"documents"} if packing == "documents" else set())
        for row in range(BATCH):
            source, start = mixture.place(step * BATCH + row)
            expected = naive(folders[source], start, length, packing, split)
            for name in set(rows) - {"samples"}:
                assert rows[name].dtype == torch.int64
                assert rows[name][row].tolist() == expected[name], (name, step, row)
        assert rows["samples"].tolist() == [step * BATCH + row for row in range(BATCH)]


@pytest.mark.parametrize("packing", ["documents", "stream"])
def test_over_an_epoch_each_token_is_a_label_once_except_where_nothing_leads_to_it(
    folders: list[Path], packing: str
) -> None:
    mixture = read(folders[:1], batch=1, packing=packing)
    tokens, numbers = whole(folders[0])
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(mixture.steps_per_epoch):
        labels = mixture.rows(step, range(1))["labels"][0].tolist()
        start = mixture.place(step)[1]
        seen.update((start + i + 1, label) for i, label in enumerate(labels) if label != -100)
    first = {place for place in range(len(tokens)) if not place or numbers[place] != numbers[place - 1]}
    left_out = first if packing == "documents" else {0}
    assert seen == Counter({(place, token): 1 for place, token in enumerate(tokens) if place not in left_out})


def test_epochs_have_orders_of_their_own_and_each_is_whole(folders: list[Path]) -> None:
    mixture = read(folders[:1], batch=1)
    count = mixture.steps_per_epoch
    epochs = [[mixture.place(epoch * count + i)[1] for i in range(count)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, count * LENGTH, LENGTH)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != [read(folders[:1], batch=1, seed=4).place(i)[1] for i in range(count)]


def test_the_rows_of_a_step_are_the_same_however_ranks_and_micro_batches_cut_them(folders: list[Path]) -> None:
    """(dp, micro-batches) splits, uneven ones too, each rank with a reader of its own and its own order of asking."""
    expected = read(folders, batch=12).rows(5, range(12))
    for cuts in ([12], [6, 6], [3, 3, 3, 3], [5, 4, 3], [1] * 12, [0, 12]):
        ends = [sum(cuts[:i]) for i in range(len(cuts) + 1)]
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for i in reversed(range(len(cuts))):
            mixture = read(folders, batch=12)
            mixture.rows(99, range(12))
            parts[i] = mixture.rows(5, range(ends[i], ends[i + 1]))
        for name, whole_step in expected.items():
            assert torch.equal(torch.cat([parts[i][name] for i in range(len(cuts))]), whole_step), (cuts, name)


def on_rank(layouts: list[str], paths: list[str], batch: int) -> dict[str, tuple[int, Any]]:
    found = {}
    for text in layouts:
        mesh = Mesh(Layout.parse(text))
        share = batch // mesh.size("dp")
        first = mesh.index("dp") * share
        rows = Mixture([Source(p) for p in paths], length=LENGTH, batch=batch, seed=3).rows(
            2, range(first, first + share)
        )
        found[text] = (mesh.index("dp"), {name: tensor.tolist() for name, tensor in rows.items()})
    return found


def test_real_ranks_read_the_same_batch_under_every_layout(worlds: Callable[[int], World], folders: list[Path]) -> None:
    layouts = ["dp4 zero1", "dp2 tp2 sp", "dp2 cp2 ulysses", "pp2 dp2", "tp4"]
    answers = worlds(4).run(on_rank, layouts, [str(f) for f in folders], 8)
    expected = read(folders, batch=8).rows(2, range(8))
    for text in layouts:
        by_index = {answer[text][0]: answer[text][1] for answer in answers}
        assert all(answer[text][1] == by_index[answer[text][0]] for answer in answers), "a group reads alike"
        for name, tensor in expected.items():
            assert [row for i in sorted(by_index) for row in by_index[i][name]] == tensor.tolist(), (text, name)


def test_a_sample_a_thousand_million_steps_on_costs_no_more_reads(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args[1]) or pread(*args))
    mixture = read(folders, weights=[0.5, 0.3, 0.2])
    costs = []
    for step in (0, 10**9, 10**15):
        reads.clear()
        mixture.rows(step, range(BATCH))
        costs.append((len(reads), sum(reads)))
    assert max(c for c, _ in costs) <= min(c for c, _ in costs) + 8 * BATCH  # a window over two shards asks twice
    assert max(size for _, size in costs) < 20 * BATCH * LENGTH


def test_a_reader_of_many_shards_holds_few_files_open_and_reads_the_same(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(folders, batch=64).rows(0, range(64))
    monkeypatch.setattr("isograd.data.files.OPEN", 1)
    before = len(os.listdir("/proc/self/fd"))
    mixture = read(folders, batch=64)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in mixture.rows(0, range(64)).items())
    assert len(os.listdir("/proc/self/fd")) <= before + len(folders)


def test_a_blend_takes_each_source_by_its_weight_and_without_repeats(folders: list[Path]) -> None:
    mixture = read(folders, weights=[0.5, 0.3, 0.2])
    places = [mixture.place(sample) for sample in range(100)]
    assert Counter(source for source, _ in places) == {0: 50, 1: 30, 2: 20}
    for source, folder in enumerate(folders):
        windows = -(-(Tokens(folder).tokens - 1) // LENGTH)
        starts = [start for s, start in places if s == source][:windows]
        assert len(set(starts)) == len(starts)


def test_the_fingerprint_changes_with_whatever_changes_a_sample(folders: list[Path]) -> None:
    plain = read(folders[:2]).fingerprint
    assert plain == read(folders[:2], weights=[2.0, 2.0]).fingerprint
    others = [
        read(folders[1::-1]),
        read(folders[:1]),
        read(folders[:2], weights=[1.0, 2.0]),
        read(folders[:2], length=LENGTH + 1),
        read(folders[:2], batch=BATCH + 1),
        read(folders[:2], seed=4),
        read(folders[:2], packing="stream"),
        read(folders[:2], split="validation"),
    ]
    assert len({plain, *(other.fingerprint for other in others)}) == len(others) + 1


def test_the_fingerprint_knows_other_text_of_the_same_length(tmp_path: Path) -> None:
    for name, text in {"one": "a text", "two": "A text"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
        build(tmp_path / name, [tmp_path / f"{name}.txt"], validation=0)
    assert read([tmp_path / "one"]).fingerprint != read([tmp_path / "two"]).fingerprint


def test_the_order_is_the_one_that_runs_were_begun_with(tmp_path: Path) -> None:
    """When this fails, every run that is resumed would meet other samples: raise ORDER in mixture.py."""
    for name, size in {"a": 60, "b": 43}.items():
        (tmp_path / f"{name}.txt").write_text("x" * size)
        build(tmp_path / name, [tmp_path / f"{name}.txt"], validation=0)
    mixture = read([tmp_path / "a", tmp_path / "b"], weights=[0.6, 0.4], length=4, batch=3, seed=5)
    expected = [(0, 12), (1, 40), (0, 8), (0, 4), (1, 4), (0, 40), (1, 32), (0, 28)]
    assert [mixture.place(sample) for sample in range(8)] == expected
    assert [mixture.place(10**12 + sample) for sample in range(3)] == [(0, 28), (1, 40), (0, 48)]


def test_what_a_mixture_is_can_be_printed(folders: list[Path]) -> None:
    text = read(folders[:2], weights=[3.0, 1.0]).describe()
    assert "75.00% of samples" in text
    assert "25.00% of samples" in text
    assert "vocabulary 257" in text


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("IG906", {"length": 0}),
        ("IG906", {"batch": 0}),
        ("IG906", {"split": "test"}),
        ("IG906", {"packing": "pad"}),
        ("IG906", {"weights": [1.0, 0.0]}),
        ("IG907", {"weights": [1.0, 0.1234567]}),
    ],
)
def test_a_mixture_that_cannot_be_read_is_refused(folders: list[Path], code: str, options: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        read(folders[:2], **options)
    assert caught.value.code == code


@pytest.mark.parametrize(("step", "rows"), [(-1, range(1)), (0, range(BATCH + 1)), (0, range(-1, 1)), (0, range(6, 8))])
def test_rows_outside_the_batch_are_refused(folders: list[Path], step: int, rows: range) -> None:
    with pytest.raises(DataError, match="no such rows"):
        read(folders).rows(step, rows)


def test_no_rows_are_a_batch_of_none(folders: list[Path]) -> None:
    assert {name: tuple(t.shape) for name, t in read(folders).rows(0, range(0)).items()} == {
        "tokens": (0, LENGTH),
        "labels": (0, LENGTH),
        "documents": (0, LENGTH),
        "samples": (0,),
    }


@pytest.mark.parametrize("packing", ["documents", "whole"])
def test_a_window_counts_once_when_nothing_is_to_repeat(folders: list[Path], packing: str) -> None:
    """A held-out loss over more batches than there are windows was a mean in which some windows counted more often."""
    options = {"weights": [3.0, 1.0], "split": "validation", "packing": packing}
    once, again = read(folders[:2], repeat=False, **options), read(folders[:2], **options)
    every = sum(once._windows)
    labelled, steps = 0, [step for step in range(every * 8) if once.has_new(step)]
    for step in range(len(steps) + 3):
        here, there = once.rows(step, range(BATCH)), again.rows(step, range(BATCH))
        for row in range(BATCH):
            new = once._is_new(step * BATCH + row)
            labelled += new
            assert torch.equal(here["labels"][row], there["labels"][row] if new else torch.full((LENGTH,), -100))
    assert steps == list(range(len(steps)))
    assert labelled == every
