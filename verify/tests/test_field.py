"""Programs of public training code that were judged wrongly, or not at all: what is said of each today."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isograd_verify
from isograd_verify.compare import diagnose
from isograd_verify.compare.compare import compare
from isograd_verify.judge import checks, patterns
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.patterns import Symptom
from isograd_verify.record.recording import Recording
from isograd_verify.run.attach import inspect
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject
from isograd_verify.watch.capture import Capture

from . import field, loops
from .recordings import Held, Step, numbers, write

Worlds = Callable[[int], LocalRanks]

RIGHT: dict[str, tuple[Any, ...]] = {
    "DDP, one tensor with equal gradients on all ranks": (field.first_output,),
    "DDP with LBFGS and a closure": (field.lbfgs,),
    "a policy gradient: a negated mean": (field.policy_gradient,),
    "find_unused_parameters and an unused mean": (field.unused_mean,),
    "masked sums and negated logsigmoids, as in TRL": (field.masked_terms,),
    "open_clip with gather_with_grad": (field.open_clip, True),
    "open_clip's default with its factor put back": (field.open_clip, False, True),
    "loss_parallel": (field.column_parallel, 96, "loss_parallel"),
    "loss_parallel over an odd vocabulary": (field.column_parallel, 97, "loss_parallel"),
    "DTensor's column-parallel over an odd vocabulary": (field.column_parallel, 97),
    "torch.distributed.pipelining": (field.pipeline,),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_of_the_field_passes(worlds: Worlds, tmp_path: Path, name: str) -> None:
    said = [f for f in watched(worlds, tmp_path, *RIGHT[name]).findings if f.verdict != NOTE]
    assert said == []


@pytest.mark.parametrize("own_count", [False, True])
def test_a_loss_that_nobody_can_count_is_judged_where_its_program_counts_it(
    worlds: Worlds, tmp_path: Path, own_count: bool
) -> None:
    subject = watched(worlds, tmp_path, field.fused, True, own_count)
    assert bugs(subject) == (["mean-of-means"] if own_count else [])
    assert not [f for f in subject.findings if "verify.weigh" in f.sentence]
    if own_count:
        assert "each divides by its own number of labels: 5, 2" in only(subject).sentence


@pytest.mark.parametrize("own_count", [False, True])
@pytest.mark.parametrize("form", ["divided", "times the inverse", "cast"])
def test_a_mask_whose_sum_divides_counts_the_labels(worlds: Worlds, tmp_path: Path, form: str, own_count: bool) -> None:
    assert bugs(watched(worlds, tmp_path, field.by_hand, own_count, form)) == (["mean-of-means"] if own_count else [])


@pytest.mark.parametrize("own_seed", [False, True])
def test_equal_masks_on_data_ranks_are_noted(worlds: Worlds, tmp_path: Path, own_seed: bool) -> None:
    subject = watched(worlds, tmp_path, field.dropped, own_seed)
    said = [(f.verdict, f.bug, f.axis, f.tensors) for f in subject.findings]
    assert said == ([] if own_seed else [(NOTE, "same-masks", "ranks 0, 1", ("1",))])
    assert subject.verdict == PASS


def test_weigh_does_nothing_outside_of_the_verifier_and_refuses_other_reductions() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    assert isograd_verify.weigh(loss, 3) is loss
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        isograd_verify.weigh(loss, 3, reduction="none")


def test_a_missing_sum_of_a_closure_is_named(worlds: Worlds, tmp_path: Path) -> None:
    assert bugs(watched(worlds, tmp_path, field.closure_unreduced)) == ["nosync-missing"]


def test_open_clips_default_is_named_with_the_factor_of_the_encoders(worlds: Worlds, tmp_path: Path) -> None:
    found = only(watched(worlds, tmp_path, field.open_clip, False))
    assert found.bug == "cut-graph"
    assert set(found.tensors) == {"image.weight", "image.bias", "text.weight", "text.bias"}
    assert dict(found.coefficients)["logit_scale"] == pytest.approx(1)
    assert "count 0.5 times what they should" in found.sentence


def test_a_second_use_of_log_softmax_under_loss_parallel_is_named(worlds: Worlds, tmp_path: Path) -> None:
    found = only(watched(worlds, tmp_path, field.column_parallel, 96, "log_softmax"))
    assert found.bug == "log-softmax-uncorrected"
    assert "embed.weight" in found.tensors


def test_scale_grads_over_two_calls_of_a_schedule_has_an_id_and_a_cause(worlds: Worlds, tmp_path: Path) -> None:
    found = only(watched(worlds, tmp_path, field.pipeline, 2))
    assert found.bug == "accum-redivided"
    assert [c for _, c in found.coefficients] == pytest.approx([0.25, 0.25, 0.5, 0.5])
    assert "scale_grads" in found.look


@pytest.mark.medium
@pytest.mark.parametrize("wrong", [False, True])
def test_stages_that_share_their_parameters_names_are_told_apart_by_rank(  # V10
    worlds: Worlds, tmp_path: Path, wrong: bool
) -> None:
    worlds(4).run(partial(field.watched, field.zero_bubble, str(tmp_path / "r"), wrong))
    subject = inspect(tmp_path / "r")
    assert subject.verdict == (BUG if wrong else PASS), subject.findings
    if wrong:
        assert "weights (Sequential.0.weight) on ranks 2, 3: not summed over ranks 2, 3" in only(subject).sentence


@pytest.mark.parametrize("own_count", [False, True])
def test_labels_of_a_pipelines_micro_batches_weigh_the_same(worlds: Worlds, tmp_path: Path, own_count: bool) -> None:
    subject = watched(worlds, tmp_path, field.pipeline_of_labels, own_count)
    assert bugs(subject) == (["mean-of-means"] if own_count else [])
    if own_count:
        assert "step 1" in only(subject).sentence and ": 2, 1" in only(subject).sentence


@pytest.mark.medium
@pytest.mark.parametrize("which", ["", "1."])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_sums_in_hooks_behind_every_accumulation_are_named(
    worlds: Worlds, tmp_path: Path, which: str, accumulate: int
) -> None:
    found = only(watched(worlds, tmp_path, loops.reduced_in_hooks, which, accumulate))
    assert (found.bug, found.axis) == ("accum-rereduced", "micro-batches")
    assert set(found.tensors) == {n for n, _ in loops.network().named_parameters() if which in n}


def test_sums_in_hooks_of_what_a_micro_batch_adds_pass(worlds: Worlds, tmp_path: Path) -> None:
    assert bugs(watched(worlds, tmp_path, loops.reduced_in_hooks, "", 3, False)) == []


@pytest.mark.parametrize("scale", [True, False])
def test_the_shape_inference_of_a_pipeline_is_no_data_and_a_finding_is_told_once(
    worlds: Worlds, tmp_path: Path, scale: bool
) -> None:
    worlds(1).run(partial(field.watched, field.pipeline_alone, str(tmp_path / "one")))
    worlds(2).run(partial(field.watched, field.pipeline, str(tmp_path / "two"), 1, scale))
    subject = compare(Recording(tmp_path / "one"), Recording(tmp_path / "two"))
    if scale:
        assert subject.verdict == PASS
    else:
        assert "2 times what they should be" in only(subject).sentence


# -- on one process ----------------------------------------------------------------------------------------------


def test_an_error_in_one_sense_costs_this_sense_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher must not end because a program does what it does not expect: all else is judged."""

    def broken(*_: Any) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("isograd_verify.watch.means.Means.look", broken)
    with Capture(tmp_path, steps=2, lenient=True):
        loop()
    subject = inspect(tmp_path)
    assert subject.facts["steps"] == "2"
    (found,) = subject.findings
    assert found.verdict == INCONCLUSIVE
    assert found.sentence.startswith("not judged: means in the loss: watching them raised an error on rank 0: IndexErr")


def test_an_error_in_one_check_is_said_and_the_other_checks_run(  # V16
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(analysis: Analysis) -> Any:
        """Something holds."""
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(checks, "CHECKS", (broken, *checks.CHECKS))
    found = checks.check(write(tmp_path, two_ranks(unreduced=("up.weight",))))
    assert [f.tensors for f in found if f.verdict == BUG][:1] == [("up.weight",)]
    monkeypatch.setattr(checks, "CHECKS", (broken,))
    (found,) = checks.check(Recording(tmp_path))
    assert found.verdict == NOTE
    assert found.sentence == (
        "step 1: not judged: Something holds: an error of the verifier in its check 'broken', please report it: "
        "ZeroDivisionError: division by zero"
    )


def test_embeddings_with_sparse_gradients_are_watched(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Embedding(5, 3, sparse=True).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.tensor([0, 3, 3])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with Capture(tmp_path, steps=2, lenient=True):
        program()
    assert inspect(tmp_path).verdict == PASS


# -- on recordings -----------------------------------------------------------------------------------------------


def test_a_comparison_of_one_of_three_gradients_is_inconclusive_and_says_so_first(tmp_path: Path) -> None:
    """DeepSpeed's ZeRO 3 keeps empty parameters: what has no place cannot be compared, and that is the first line."""
    names = ("a", "b", "c")
    whole = {n: (numbers(4, 3, seed=i), numbers(4, 3, seed=i + 10)) for i, n in enumerate(names)}
    one = write(tmp_path / "one", [[Step({n: Held(v, g) for n, (v, g) in whole.items()})]])
    empty = torch.empty(0, dtype=torch.float64)
    held = {n: Held(v, g) if n == "a" else Held(empty, empty) for n, (v, g) in whole.items()}
    subject = compare(one, write(tmp_path / "two", [[Step(held)], [Step(held)]]))
    assert subject.verdict == INCONCLUSIVE
    assert subject.findings[0].sentence.startswith("only 1 of 3 gradients were compared; not compared: b, c: which")
    wrong = {**held, "a": Held(whole["a"][0], 0.5 * whole["a"][1])}
    subject = compare(one, write(tmp_path / "three", [[Step(wrong)], [Step(wrong)]]))
    assert subject.findings[0].sentence.startswith("only 1 of 3")
    assert not any("all 1 gradients" in f.sentence for f in subject.findings)


@pytest.mark.parametrize("beyond", [None, 0])
def test_whole_gradients_of_parameters_that_are_kept_empty_are_compared(tmp_path: Path, beyond: int | None) -> None:
    """DeepSpeed's ZeRO 3: the engine tells the whole gradient, the parameter's own memory is given up between steps."""
    whole = {n: (numbers(8, 6, seed=i), numbers(8, 6, seed=i + 10)) for i, n in enumerate("ab")}
    one = write(tmp_path / "one", [[Step({n: Held(v, g) for n, (v, g) in whole.items()})]], beyond=beyond)
    empty = torch.empty(0, dtype=torch.float64)
    right = {n: Held(empty, g, after=empty) for n, (_, g) in whole.items()}
    assert compare(one, write(tmp_path / "two", [[Step(right)], [Step(right)]], beyond=beyond)).verdict == PASS
    half = {n: Held(empty, 0.5 * g, after=empty) for n, (_, g) in whole.items()}
    found = only(compare(one, write(tmp_path / "three", [[Step(half)], [Step(half)]], beyond=beyond)))
    assert "all 2 gradients: 0.5 times what they should be" in found.sentence


@pytest.mark.parametrize(
    ("coefficients", "bug"),
    [((0.25, 0.25, 0.5, 0.5), "accum-redivided"), ((2, 2, 1, 1), "accum-rereduced"), ((1, 3, 2, 1), "")],
)
def test_several_micro_batches_for_each_reduction_show_the_same_pattern(
    tmp_path: Path, coefficients: tuple[float, ...], bug: str
) -> None:
    parts = {m: numbers(6, 5, seed=m) for m in range(4)}
    gradient = sum(c * parts[m] for m, c in enumerate(coefficients))
    assert isinstance(gradient, Tensor)
    (found,) = checks.check(write(tmp_path, [[Step({"up.weight": Held(numbers(6, 5), gradient, parts=parts)})]]))
    assert (found.verdict, found.bug, found.axis) == (BUG, bug, "micro-batches")


def two_ranks(unreduced: tuple[str, ...]) -> list[list[Step]]:
    names = {"up.weight": 3, "down.weight": 4}
    parts = {n: [numbers(5, 6, seed=s + 10 * r) for r in range(2)] for n, s in names.items()}
    return [
        [Step({n: Held(numbers(5, 6, seed=s), parts[n][r] if n in unreduced else parts[n][0] + parts[n][1],
                       parts={0: parts[n][r]}) for n, s in names.items()})]
        for r in range(2)
    ]  # fmt: skip


def test_a_factor_of_one_is_a_defect_of_the_verifier_and_says_so(tmp_path: Path) -> None:  # V1
    step, name = Analysis(write(tmp_path, two_ranks(unreduced=())), 1), "up.weight"
    wrong: Any = SimpleNamespace(name=name, errors={0: 1.0})
    found = diagnose._finding(step, diagnose.Reading(Symptom(patterns.SCALED, 1.0)), [name], {name}, [wrong])
    assert (found.verdict, "1 times what they should be: a defect of the verifier" in found.sentence) == (
        INCONCLUSIVE, True,
    )  # fmt: skip


def test_norms_that_are_not_summed_over_different_axes_are_two_findings(tmp_path: Path) -> None:
    """One norm misses the sum over tp, another one the sum over dp: each is told with its own axis."""
    coordinates = [(dp, tp) for dp in range(2) for tp in range(2)]
    misses = {"norm1.weight": "tp", "norm2.weight": "dp", "up.weight": ""}
    parts = {n: {c: numbers(9, seed=10 * i + 2 * c[0] + c[1]) for c in coordinates} for i, n in enumerate(misses)}

    def summed(name: str, dp: int, tp: int) -> Tensor:
        counted = [p for (d, t), p in parts[name].items()
                   if (misses[name] != "tp" or t == tp) and (misses[name] != "dp" or d == dp)]  # fmt: skip
        return torch.stack(counted).sum(0)

    ranks = [
        [Step({n: Held(numbers(9, seed=90 + i), summed(n, dp, tp), parts={0: parts[n][dp, tp]})
               for i, n in enumerate(misses)})]
        for dp, tp in coordinates
    ]  # fmt: skip
    found = [f for f in checks.check(write(tmp_path, ranks, "dp2 tp2")) if f.verdict == BUG]
    assert {(f.bug, f.axis, f.tensors) for f in found} == {
        ("norm-unreduced", "tp", ("norm1.weight",)),
        ("norm-unreduced", "dp", ("norm2.weight",)),
    }


def loop() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def watched(worlds: Worlds, home: Path, program: Callable[..., None], *args: Any) -> Subject:
    worlds(2).run(partial(field.watched, program, str(home), *args))
    return inspect(home)


def bugs(subject: Subject) -> list[str]:
    return [f.bug for f in subject.findings if f.verdict == BUG]


def only(subject: Subject) -> Finding:
    (found,) = [f for f in subject.findings if f.verdict == BUG]
    return found


def test_a_division_by_the_number_of_ranks_at_two_places_has_an_id(tmp_path: Path) -> None:
    """Two ranks, and all gradients are a quarter of one device's."""
    value, gradient = numbers(4, 3), numbers(4, 3, seed=1)
    one = write(tmp_path / "one", [[Step({"up.weight": Held(value, gradient)})]])
    quarter = Step({"up.weight": Held(value, 0.25 * gradient)})
    found = only(compare(one, write(tmp_path / "two", [[quarter], [quarter]])))
    assert (found.bug, found.axis) == ("divided-twice", "ranks 0, 1")
    assert "1 / the size of the group of ranks 0, 1, twice" in found.sentence
