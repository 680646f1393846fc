"""Two recordings are compared tensor by tensor and block by block, however names, shards and data are spread."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd_verify.compare.compare import compare
from isograd_verify.compare.same_data import same_data
from isograd_verify.compare.tensorwise import block_error
from isograd_verify.compare.values import whole_values
from isograd_verify.errors import VerifyError
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import Event, Norm, Result
from isograd_verify.record.recording import Recording
from isograd_verify.run.corpus import Bench, every_name
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject

from .recordings import RATE, Held, Step, numbers, write

SHAPES = {"embed.weight": (11, 6), "up.weight": (8, 6), "up.bias": (8,), "down.weight": (6, 8), "norm.weight": (6,)}
DATA = numbers(6, 5, seed=50)  # rows are samples
MICROS = 2


def start(name: str) -> Tensor:
    constant = {"norm.weight": torch.ones(6).double(), "up.bias": torch.zeros(8).double()}
    return constant.get(name, numbers(*SHAPES[name], seed=len(name)))


def part(name: str, step: int, rank: int, micro: int) -> Tensor:
    """What one micro-batch of one data rank adds to a gradient."""
    return numbers(*SHAPES[name], seed=1000 * step + 100 * rank + 10 * micro + len(name))


def right(steps: int = 2, data_ranks: int = 2) -> list[list[Step]]:
    """Every data rank holds everything, and each gradient is the sum of what all ranks' micro-batches added."""
    ranks: list[list[Step]] = [[] for _ in range(data_ranks)]
    value = {name: start(name) for name in SHAPES}
    for step in range(steps):
        whole = {n: sum(part(n, step, k, m) for k in range(2) for m in range(MICROS)) for n in SHAPES}
        for rank in range(data_ranks):
            mine = range(2) if data_ranks == 1 else [rank]
            pieces = [(k, m) for k in mine for m in range(MICROS)]
            held = {
                n: Held(value[n], whole[n], parts={i: part(n, step, k, m) for i, (k, m) in enumerate(pieces)})
                for n in SHAPES
            }
            inputs = [DATA.tensor_split(4)[2 * k + m] for k, m in pieces]
            ranks[rank].append(Step(held, inputs))
        value = {n: value[n] - RATE * whole[n] for n in SHAPES}
    return ranks


def changed(ranks: list[list[Step]], name: str, **values: Any) -> list[list[Step]]:
    """In the first step, on all ranks; a function is given the old value."""
    for steps in ranks:
        old = steps[0].held[name]
        new = {key: v(getattr(old, key)) if callable(v) else v for key, v in values.items()}
        steps[0].held[name] = replace(old, **new)
    return ranks


def renamed(ranks: list[list[Step]], table: dict[str, str]) -> list[list[Step]]:
    return [
        [replace(step, held={table.get(name, name): one for name, one in step.held.items()}) for step in steps]
        for steps in ranks
    ]


@pytest.fixture
def reference(tmp_path: Path) -> Recording:
    return write(tmp_path / "reference", right(data_ranks=1), "1")


@pytest.fixture
def judged(reference: Recording, tmp_path: Path) -> Any:
    def judge(ranks: list[list[Step]], layout: str = "dp2", **options: Any) -> Subject:
        return compare(reference, write(tmp_path / "candidate", ranks, layout), **options)

    return judge


def only(subject: Subject, verdict: str) -> Finding:
    """The one finding that changes the verdict."""
    found = [f for f in subject.findings if f.verdict != NOTE]
    assert len(found) == 1, [f.sentence for f in found]
    assert found[0].verdict == verdict
    return found[0]


# -- what is equal -------------------------------------------------------------------------------------------------


def test_a_recording_equals_itself(reference: Recording) -> None:
    subject = compare(reference, reference)
    assert subject.verdict == PASS
    assert subject.findings == []
    assert subject.errors == dict.fromkeys(SHAPES, 0.0)
    assert subject.compared


def test_the_same_step_on_two_data_ranks_passes(judged: Any) -> None:
    subject = judged(right())
    assert subject.findings == []
    assert (subject.name, subject.world) == ("dp2", 2)
    assert set(subject.errors) == set(SHAPES)
    assert max(subject.errors.values()) < 1e-12
    assert all(len(row) == 2 and None not in row for row in subject.by_rank.values())


def test_the_gradients_of_every_common_step_are_compared(judged: Any) -> None:
    subject = judged(right())
    assert subject.facts["gradients"] == "5 compared by name, step 2 last"


@pytest.mark.medium
def test_a_corpus_program_passes_against_its_reference(bench: Bench) -> None:
    (what,) = every_name(["wrong-group"])
    subject = compare(bench.watch(what, 1, False, 0), bench.watch(what, 4, False, 0))
    assert subject.verdict == PASS
    assert (subject.name, subject.world) == ("dp2 tp2", 4)
    assert max(subject.errors.values()) < 1e-12


# -- the same data -------------------------------------------------------------------------------------------------


def with_data(ranks: list[list[Step]], *inputs: list[Tensor]) -> list[list[Step]]:
    for steps, given in zip(ranks, inputs, strict=True):
        for step in steps:
            step.inputs = given
    return ranks


def test_data_that_differ_in_one_element_are_refused(reference: Recording, tmp_path: Path) -> None:
    other = DATA.clone()
    other[4, 2] += 1e-12
    candidate = write(tmp_path / "candidate", with_data(right(), [other[:3]], [other[3:]]))
    with pytest.raises(VerifyError, match="IG722: the two runs saw different data in their first step") as error:
        compare(reference, candidate)
    assert "--ignore-data" in str(error.value)
    assert compare(reference, candidate, ignore_data=True).verdict == PASS


SAME_DATA: dict[str, tuple[list[Tensor], list[Tensor]]] = {
    "in other pieces": ([DATA[:1]], [DATA[1:4], DATA[4:]]),
    "in another order": ([DATA[[5, 2, 0]]], [DATA[[1, 4, 3]]]),
    "all of it on both ranks": ([DATA], [DATA.flip(0)]),
    "all of it on one rank": ([DATA], []),
    "cut along the sequence": ([DATA[:, :2]], [DATA[:, 2:]]),
    "not recorded": ([], []),
}


@pytest.mark.parametrize("name", SAME_DATA)
def test_the_same_data_are_known_however_they_are_spread(reference: Recording, tmp_path: Path, name: str) -> None:
    candidate = write(tmp_path / "candidate", with_data(right(), *SAME_DATA[name]))
    assert compare(reference, candidate).verdict == PASS


OTHER_DATA: dict[str, tuple[list[Tensor], list[Tensor]]] = {
    "a row is missing": ([DATA[:3]], [DATA[3:5]]),
    "a row is there twice": ([DATA[:3]], [DATA[2:]]),
    "one rank has the other's too": ([DATA], [DATA[3:]]),
}


@pytest.mark.parametrize("name", OTHER_DATA)
def test_other_data_are_refused(reference: Recording, tmp_path: Path, name: str) -> None:
    candidate = write(tmp_path / "candidate", with_data(right(), *OTHER_DATA[name]))
    with pytest.raises(VerifyError, match="IG722"):
        same_data(reference, candidate)


# -- names ---------------------------------------------------------------------------------------------------------

TABLE = {"embed.weight": "wte.weight", "norm.weight": "ln_f.weight"}


def test_a_rename_table_maps_the_candidates_names(judged: Any) -> None:
    subject = judged(renamed(right(), TABLE), rename={new: old for old, new in TABLE.items()})
    assert subject.verdict == PASS
    assert set(subject.errors) == {"wte.weight", "ln_f.weight", "up.weight", "up.bias", "down.weight"}


def test_names_that_no_table_gives_are_matched_by_shape_and_order(reference: Recording, tmp_path: Path) -> None:
    ranks = renamed(right(), {name: f"model.{i}" for i, name in enumerate(SHAPES)})
    subject = compare(reference, write(tmp_path / "candidate", ranks))
    assert subject.verdict == PASS
    assert set(subject.errors) == {f"model.{i}" for i in range(5)}
    assert max(subject.errors.values()) < 1e-12


def test_tensors_of_one_shape_are_matched_in_their_order(tmp_path: Path) -> None:
    layers = [numbers(5, 3, seed=i) for i in range(3)]
    one = {f"layers.{i}.weight": Held(w, 2 * w + i) for i, w in enumerate(layers)}
    other = {f"h{i}.w": Held(w, 2 * w + i) for i, w in enumerate(layers)}
    subject = compare(write(tmp_path / "a", [[Step(one)]]), write(tmp_path / "b", [[Step(other)]]))
    assert subject.errors == {"h0.w": 0.0, "h1.w": 0.0, "h2.w": 0.0}


def test_a_table_that_names_unknown_tensors_is_refused(judged: Any) -> None:
    with pytest.raises(VerifyError, match="IG723") as error:
        judged(right(), rename={"embed.weight": "wte.weight"})
    assert "wte.weight" in str(error.value)


def test_recordings_of_two_models_are_refused(judged: Any) -> None:
    stranger = Held(numbers(4, 3), numbers(4, 3, seed=1))
    with pytest.raises(VerifyError, match="IG724") as error:
        judged([[Step({"stranger": stranger})]] * 2)
    assert "stranger" in str(error.value)
    assert "embed.weight" in str(error.value)


def test_a_tensor_on_one_side_only_leaves_the_verdict_open(judged: Any, reference: Recording, tmp_path: Path) -> None:
    more = right()
    for steps in more:
        for step in steps:
            step.held["extra"] = Held(numbers(3, 2), numbers(3, 2, seed=1))
    found = only(judged(more), INCONCLUSIVE)
    assert found.sentence == (
        "only 5 of 6 gradients were compared; not compared: extra: the reference has no such tensor"
    )
    assert found.tensors == ("extra",)
    fewer = right()
    for steps in fewer:
        for step in steps:
            del step.held["down.weight"]
    found = only(compare(reference, write(tmp_path / "fewer", fewer, "dp2")), INCONCLUSIVE)
    assert found.sentence == (
        "only 4 of 5 gradients were compared; not compared: down.weight: only the reference has such a tensor"
    )


# -- steps ---------------------------------------------------------------------------------------------------------


def test_recordings_without_a_common_step_are_refused(reference: Recording, tmp_path: Path) -> None:
    candidate = write(tmp_path / "candidate", right())
    for path in candidate.path.rglob("step-0*.safetensors"):
        path.unlink()
    with pytest.raises(VerifyError, match="IG721") as error:
        compare(reference, candidate)
    assert "reference: steps [1, 2], candidate: steps []" in str(error.value)


def test_a_longer_recording_is_compared_over_the_common_steps(judged: Any) -> None:
    assert judged(right(steps=3)).verdict == PASS


def test_a_later_step_that_goes_wrong_is_named_by_its_number(judged: Any) -> None:
    ranks = right()
    for steps in ranks:
        one = steps[1].held["up.weight"]
        steps[1].held["up.weight"] = replace(one, gradient=1.5 * one.gradient)
    found = [f for f in judged(ranks).findings if f.verdict == BUG]
    assert found
    assert all(f.sentence.startswith("step 2: ") for f in found)


# -- shards --------------------------------------------------------------------------------------------------------


def rows_of(ranks: list[list[Step]], cuts: dict[str, tuple[int, list[list[int]]]], boxes: bool) -> list[list[Step]]:
    """Cut these tensors along a dimension, each rank to its own indices."""
    for rank, steps in enumerate(ranks):
        for step in steps:
            for name, (dim, indices) in cuts.items():
                one, mine = step.held[name], torch.tensor(indices[rank])
                box = [[0, size] for size in one.value.shape]
                box[dim] = [indices[rank][0], indices[rank][-1] + 1]
                step.held[name] = Held(
                    one.value.index_select(dim, mine),
                    one.gradient.index_select(dim, mine) if one.gradient is not None else None,
                    box if boxes else None,
                    tuple(one.value.shape) if boxes else None,
                    {m: p.index_select(dim, mine) for m, p in one.parts.items()},
                )
    return ranks


EVEN = {
    "up.weight": (0, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "up.bias": (0, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "down.weight": (1, [[0, 1, 2, 3], [4, 5, 6, 7]]),
}
FUSED = {
    "up.weight": (0, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    "up.bias": (0, [[0, 1, 4, 5], [2, 3, 6, 7]]),
}
UNEVEN = {"embed.weight": (0, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])}


def tensor_parallel() -> list[list[Step]]:
    """Two ranks that compute the same data, so that each one's parts are the whole sums."""
    return [right(data_ranks=1)[0], right(data_ranks=1)[0]]


@pytest.mark.parametrize(
    ("cuts", "boxes"),
    [(EVEN, False), (EVEN, True), (FUSED, False), (UNEVEN, False), (UNEVEN, True), ({**EVEN, **UNEVEN}, True)],
)
def test_shards_are_put_in_their_places(judged: Any, cuts: Any, boxes: bool) -> None:
    subject = judged(rows_of(tensor_parallel(), cuts, boxes), "tp2")
    assert subject.findings == []
    assert max(subject.errors.values()) < 1e-12
    assert set(subject.errors) == set(SHAPES)


def test_an_error_in_one_shard_is_shown_on_the_rank_that_holds_it(judged: Any) -> None:
    ranks = rows_of(tensor_parallel(), EVEN, True)
    one = ranks[1][0].held["up.weight"]
    ranks[1][0].held["up.weight"] = replace(one, gradient=one.gradient * 1.001)
    subject = judged(ranks, "tp2")
    assert subject.verdict == BUG
    assert subject.by_rank["up.weight"][0] < 1e-12
    assert subject.by_rank["up.weight"][1] == pytest.approx(1e-3)
    assert {name for name, error in subject.errors.items() if error > 1e-12} == {"up.weight"}


def test_a_reference_may_itself_be_sharded(reference: Recording, tmp_path: Path) -> None:
    sharded = write(tmp_path / "sharded", rows_of(tensor_parallel(), {**EVEN, **UNEVEN}, True), "tp2")
    assert torch.equal(
        whole_values(Analysis(sharded, 1), "final")["down.weight"], reference.ranks[0].group(1, "final")["down.weight"]
    )
    subject = compare(sharded, reference)
    assert subject.verdict == PASS
    assert max(subject.errors.values()) < 1e-12
    wrong = write(tmp_path / "wrong", changed(right(data_ranks=1), "down.weight", gradient=lambda g: g.flip(0)), "1")
    found = compare(sharded, wrong)
    assert found.verdict == BUG
    assert {name for name, error in found.errors.items() if error > 1e-12} == {"down.weight"}


@pytest.mark.medium
def test_one_device_and_another_layout_can_be_compared_with_a_reference_of_fsdp(bench: Bench) -> None:
    what = every_name(["fsdp2/mean-of-means"])[0]
    sharded = bench.watch(what, 2, False, 0)
    subject = compare(sharded, bench.watch(what, 1, False, 0))
    assert subject.verdict == PASS
    assert max(subject.errors.values()) < 1e-12
    assert compare(sharded, bench.watch(what, 2, True, 0)).verdict == BUG


def test_a_tensor_whose_place_cannot_be_told_leaves_the_verdict_open(judged: Any) -> None:
    ranks = right()
    for steps in ranks:
        for step in steps:
            one = step.held["up.weight"]
            flat = {m: p.reshape(-1) for m, p in one.parts.items()}
            step.held["up.weight"] = Held(one.value.reshape(-1), one.gradient.reshape(-1), parts=flat)
    subject = judged(ranks)
    found = only(subject, INCONCLUSIVE)
    assert found.tensors == ("up.weight",)
    assert "up.weight" in found.sentence
    assert set(subject.errors) == set(SHAPES) - {"up.weight"}


def test_shards_that_changed_places_are_named(judged: Any) -> None:
    ranks = rows_of(tensor_parallel(), EVEN, True)
    for name in EVEN:
        here, there = (ranks[k][0].held[name] for k in (0, 1))
        ranks[0][0].held[name], ranks[1][0].held[name] = (
            replace(here, value=there.value, box=None), replace(there, value=here.value, box=None),
        )  # fmt: skip
    found = only(judged([steps[:1] for steps in ranks], "tp2"), BUG)
    assert (found.bug, found.axis) == ("resume-other-rank", "tp")
    assert set(EVEN) >= set(found.tensors) >= {"up.weight", "down.weight"}


def test_other_weights_before_the_first_step_leave_the_verdict_open(judged: Any) -> None:
    found = only(judged(changed(right(), "embed.weight", value=lambda w: w * 1.01)), INCONCLUSIVE)
    assert found.sentence == (
        "the weights of embed.weight differ before the first step: initialised or loaded differently"
    )


# -- what is wrong -------------------------------------------------------------------------------------------------


def scaled_everywhere(ranks: list[list[Step]], factor: float) -> list[list[Step]]:
    for name in SHAPES:
        changed(ranks, name, gradient=lambda g: factor * g)
    return ranks


@pytest.mark.parametrize(
    ("layout", "factor", "bug", "axis", "meaning"),
    [
        ("dp2", 2.0, "", "micro-batches or dp", "the number of micro-batches or the size of dp"),
        (
            "",
            2.0,
            "",
            "micro-batches or ranks 0, 1",
            "the number of micro-batches or the size of the group of ranks 0, 1",
        ),
        ("dp2", 3.5, "", "", ""),
    ],
)
def test_a_common_factor_is_told_with_all_that_it_may_come_from(
    judged: Any, layout: str, factor: float, bug: str, axis: str, meaning: str
) -> None:
    found = only(judged(scaled_everywhere(right(), factor), layout), BUG)
    assert (found.bug, found.axis, found.tensors) == (bug, axis, tuple(sorted(SHAPES)))
    assert f"all 5 gradients: {factor:g} times what they should be" in found.sentence
    assert meaning in found.sentence
    assert bool(found.look) == bool(meaning)
    assert found.coefficients


@pytest.mark.parametrize(
    ("layout", "factor", "bug", "axis"),
    [("dp2", 0.5, "ulysses-scale", "dp"), ("tp2", 2.0, "ulysses-scale", "tp"), ("dp3", 3.0, "accum-undivided", None)],
)
def test_a_factor_is_matched_to_the_group_whose_size_it_is(
    tmp_path: Path, layout: str, factor: float, bug: str, axis: str | None
) -> None:
    """With one micro-batch the group alone explains it; three micro-batches on two ranks explain a three."""
    micros = 3 if bug == "accum-undivided" else 1
    value, gradients = numbers(5, 4), [numbers(5, 4, seed=10 + i) for i in range(2 * micros)]
    whole = torch.stack(gradients).sum(0)
    one = write(tmp_path / "a", [[Step({"w": Held(value, whole, parts=dict(enumerate(gradients)))})]], "1")
    ranks = [
        [Step({"w": Held(value, factor * whole, parts=dict(enumerate(gradients[k * micros :][:micros])))})]
        for k in range(2)
    ]
    found = only(compare(one, write(tmp_path / "b", ranks, "dp2" if axis is None else layout)), BUG)
    assert (found.bug, found.axis) == (bug, axis or "micro-batches")


def test_tensors_without_a_gradient_to_speak_of_have_no_part_in_all(judged: Any, reference: Recording) -> None:
    """A key bias: its true gradient is zero, so no factor shows in it."""
    noise = [
        {**steps[0].held, "k.bias": Held(numbers(5), 1e-17 * numbers(5, seed=i))} for i, steps in enumerate(right())
    ]
    one = write(reference.path / "keys", [[Step(noise[0])]], "1")
    ranks = scaled_everywhere([[Step(held)] for held in noise], 3.0)
    subject = compare(one, write(reference.path / "wrong", ranks, "dp2"))
    assert "all 5 gradients: 3 times what they should be" in only(subject, BUG).sentence


def test_a_scaled_tensor_is_told_once(judged: Any) -> None:
    assert only(judged(changed(right(), "norm.weight", gradient=lambda g: 4 * g)), BUG).tensors == ("norm.weight",)
    assert only(judged(changed(right(), "norm.weight", gradient=lambda g: 1.1 * g)), BUG).tensors == ("norm.weight",)


def test_tensors_that_have_each_a_factor_of_their_own_are_one_finding(judged: Any) -> None:
    ranks = right()
    for i, name in enumerate(SHAPES):
        changed(ranks, name, gradient=lambda g, f=0.31 + 0.17 * i: f * g)
    found = only(judged(ranks), BUG)
    assert found.tensors == tuple(sorted(SHAPES))
    assert "0.31 to 0.99 times what they should be, each tensor by a factor of its own" in found.sentence


def test_no_divergence_is_told_beside_gradients_whose_pattern_is_known(tmp_path: Path) -> None:
    """The activations differ, too, and the gradients say all there is to say: it is one factor."""
    one, other = right(data_ranks=1), scaled_everywhere(right(), 1.1)
    for seed, steps in enumerate([*one, *other]):
        steps[0].tensors["back/0/000001/block#0"] = numbers(6, 5, seed=seed)
    found = only(compare(write(tmp_path / "a", one, "1"), write(tmp_path / "b", other, "dp2")), BUG)
    assert "all 5 gradients: 1.1 times what they should be" in found.sentence


def test_rows_that_are_wrong_are_counted(judged: Any) -> None:
    def spoil(gradient: Tensor) -> Tensor:
        return torch.cat([gradient[:8], numbers(3, 6, seed=77)])

    found = [f for f in judged(changed(right(), "embed.weight", gradient=spoil)).findings if f.verdict == BUG]
    assert len(found) == 1
    assert found[0].tensors == ("embed.weight",)
    assert "right in 8 of 11 rows, wrong in rows 8-10: cuts disagree" in found[0].sentence


def test_rows_in_another_order_are_a_permutation(judged: Any) -> None:
    found = [
        f for f in judged(changed(right(), "up.weight", gradient=lambda g: g.flip(0))).findings if f.verdict == BUG
    ]
    assert len(found) == 1
    assert "the right numbers in other places: a permutation" in found[0].sentence


@pytest.mark.parametrize("gradient", [None, torch.zeros_like])
def test_a_missing_or_zero_gradient_is_said_to_be(judged: Any, gradient: Any) -> None:
    ranks = changed(right(), "down.weight", gradient=gradient, parts={})
    found = [f for f in judged(ranks).findings if f.verdict == BUG]
    assert [(f.bug, f.tensors) for f in found] == [("cut-graph", ("down.weight",))]
    assert "zero or missing where the reference has a gradient" in found[0].sentence


def test_nan_is_a_bug_and_its_error_is_nan(judged: Any) -> None:
    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[2, 3] = math.nan
        return gradient

    subject = judged(changed(right(), "up.weight", gradient=spoil))
    assert subject.verdict == BUG
    assert math.isnan(subject.errors["up.weight"])
    assert any(f.bug == "non-finite" and f.tensors == ("up.weight",) for f in subject.findings)


def test_an_error_in_a_small_block_is_not_hidden_by_a_large_tensor(tmp_path: Path) -> None:
    value, gradient = numbers(16, 8), numbers(16, 8, seed=1)
    gradient[6:8] *= 1e-4  # one block of rows
    wrong = gradient.clone()
    wrong[6:8] *= 1 + 1e-7
    one, other = (write(tmp_path / n, [[Step({"w": Held(value, g)})]]) for n, g in (("a", gradient), ("b", wrong)))
    assert float((wrong - gradient).norm() / gradient.norm()) < 1e-10
    subject = compare(one, other)
    assert subject.verdict == BUG
    assert subject.errors["w"] == pytest.approx(1e-7, rel=1e-3)


def test_a_tensor_whose_true_gradient_is_zero_is_judged_on_the_whole(judged: Any, tmp_path: Path) -> None:
    large = {"w": Held(numbers(9, 5), numbers(9, 5, seed=1))}
    noise = [Held(numbers(5), 1e-16 * numbers(5, seed=s)) for s in (2, 3)]
    one, other = (write(tmp_path / str(i), [[Step({**large, "k.bias": n})]]) for i, n in enumerate(noise))
    assert compare(one, other).verdict == PASS


def test_block_errors_are_relative_to_the_block_and_at_least_to_a_millionth_of_the_whole() -> None:
    truth = numbers(8, 16)
    assert block_error(truth, truth, 1.0).error == 0.0
    assert block_error(truth * 1.25, truth, 1.0).error == pytest.approx(0.25)
    assert block_error(torch.full((3,), 1e-9).double(), torch.zeros(3), 1e-3).error == pytest.approx(3**0.5)
    assert block_error(torch.full((3,), 1e-9), torch.zeros(3), 1e-3).error == pytest.approx(3**0.5 / 100)  # fp32
    assert math.isnan(block_error(torch.full((3,), math.nan), torch.zeros(3), 1.0).error)


@pytest.mark.parametrize(("error", "verdict"), [(1e-6, PASS), (5e-5, PASS), (4e-4, INCONCLUSIVE), (2e-2, BUG)])
def test_single_precision_has_a_range_in_which_it_cannot_be_told(tmp_path: Path, error: float, verdict: str) -> None:
    value, gradient = numbers(4, 3).float(), numbers(4, 3, seed=1).float()
    gradients = {"a": gradient, "b": gradient * (1 + error)}
    after = value - RATE * gradient
    one, other = (write(tmp_path / n, [[Step({"w": Held(value, g, after=after)})]]) for n, g in gradients.items())
    assert compare(one, other).verdict == verdict


def test_equal_gradients_with_other_updates_leave_the_verdict_open(judged: Any) -> None:
    ranks = changed([steps[:1] for steps in right()], "up.weight", after=lambda _: torch.zeros(8, 6).double())
    found = only(judged(ranks), INCONCLUSIVE)
    assert found.tensors == ("up.weight",)
    assert "gradients are equal but the updates of up.weight differ" in found.sentence


def test_the_update_of_a_gradient_that_is_rounding_alone_is_not_compared(tmp_path: Path) -> None:
    """Adam divides a gradient by its own size: two right runs move a key bias in different directions."""
    value, large = numbers(5).float(), {"w": Held(numbers(9, 5).float(), numbers(9, 5, seed=1).float())}
    noise = [1e-9 * numbers(5, seed=s).float() for s in (2, 3)]
    keys = [{**large, "k.bias": Held(value, g, after=value - 0.001 * g.sign())} for g in noise]
    one, other = (write(tmp_path / str(i), [[Step(held)]]) for i, held in enumerate(keys))
    assert compare(one, other).findings == []


# -- loss and norm -------------------------------------------------------------------------------------------------


def with_events(ranks: list[list[Step]], *of_ranks: Event) -> list[list[Step]]:
    for steps, event in zip(ranks, of_ranks, strict=True):
        for step in steps:
            step.events = [*step.events, event]
    return ranks


def result(loss: float, weight: float = 30.0) -> Result:
    return Result(loss=loss, weight=weight)


def norm(value: float) -> Norm:
    return Norm(value=value)


def true_norm() -> float:
    squares = [float(one.gradient.square().sum()) for one in right()[0][0].held.values() if one.gradient is not None]
    return math.sqrt(sum(squares))


@pytest.mark.parametrize(("loss", "weight", "ok"), [(2.5, 30, True), (2.5001, 30, False), (2.5, 31, False)])
def test_the_logged_loss_is_the_optimised_loss(tmp_path: Path, loss: float, weight: float, ok: bool) -> None:
    reference = write(tmp_path / "a", with_events(right(data_ranks=1), result(2.5)))
    candidate = write(tmp_path / "b", with_events(right(), result(loss, weight), result(loss, weight)))
    subject = compare(reference, candidate)
    assert subject.verdict == (PASS if ok else BUG)
    assert subject.facts["loss"].startswith("2.5, relative difference ")
    if not ok:
        assert only(subject, BUG).sentence.startswith(f"step 1: the loss is {loss:.9g} over weight {weight} instead of")


@pytest.mark.parametrize(
    ("factors", "bug"), [((1, 1), ""), ((1.4, 1.4), "norm-counts-replicas"), ((0.7, 0.7), "clip-per-rank")]
)
def test_a_norm_that_is_not_the_references_is_named(tmp_path: Path, factors: tuple[float, float], bug: str) -> None:
    whole = true_norm()
    first = [steps[:1] for steps in right(data_ranks=1)]
    reference = write(tmp_path / "a", with_events(first, norm(whole)))
    ranks = with_events([steps[:1] for steps in right()], *(norm(f * whole) for f in factors))
    found = [f for f in compare(reference, write(tmp_path / "b", ranks, "dp2")).findings if f.verdict == BUG]
    assert [f.bug for f in found] == ([bug] if bug else [])


def test_notes_leave_a_comparison_passed(judged: Any) -> None:
    ranks = right()
    for steps in ranks:
        for step in steps:
            step.held["frozen"] = Held(numbers(3, 7), None)
    subject = judged(ranks)
    assert subject.verdict == PASS
    assert [f.verdict for f in subject.findings] == [NOTE] * len(subject.findings)
