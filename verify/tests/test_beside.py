"""verify run --beside-one: what watching alone cannot see, found on the data of the run itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from isograd_verify.record.recording import write_json
from isograd_verify.run import beside
from isograd_verify.run.attach import inspect, run
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Subject
from isograd_verify.watch.calls import Calls
from isograd_verify.watch.capture import Capture
from isograd_verify.watch.feed import Feed

from . import alone, field, loops

Worlds = Callable[[int], LocalRanks]


class Done(BaseException):
    """Where the process of a program would end."""


def first_run(program: Callable[..., None], directory: str, *args: Any) -> None:
    with Capture(directory, steps=2, lenient=True) as capture:
        Calls(capture)
        program(*args)


def second_run(program: Callable[..., None], directory: str, file: str, *args: Any) -> None:
    def done(capture: Capture) -> None:
        raise Done

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Capture(directory, steps=2, lenient=True) as capture:
        Feed(capture, Path(file), done)
        try:
            program(*args)
        except Done:
            pass
        except Exception as error:  # a program's own error ends its process, and no other
            capture.out.about["died"] = f"{type(error).__name__}: {error}"


@pytest.fixture
def judged(worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    """What --beside-one says of a program: its two runs are calls in worlds that are there already."""
    count = 0

    def judge(program: Callable[..., None], *args: Any, ranks: int = 2) -> Subject:
        nonlocal count
        count += 1
        home = tmp_path / str(count)
        home.mkdir()
        worlds(ranks).run(partial(first_run, program, str(home), *args))

        def begin(command: list[str], place: Path, stall: float, more: dict[str, str], about: Any) -> tuple[None, int]:
            worlds(1).run(partial(second_run, program, str(place), more["ISOGRAD_VERIFY_FEED"], *args))
            write_json(place / "recording.json", {})
            return None, 0

        monkeypatch.setattr(beside, "begin", begin)
        return beside.judged(home, ["torchrun", "--nproc-per-node=2", "train.py"], inspect(home), 60.0)

    return judge


def said(subject: Subject) -> list[tuple[str, str]]:
    return [(f.verdict, f.bug) for f in subject.findings if f.verdict != NOTE]


def test_a_right_loop_passes_beside_one_device_whatever_its_loss_divides_by(judged: Any) -> None:
    for args in (
        ("", 1),
        ("", 2),
        ("", 1, 2),
        ("", 1, 3, True, "mean"),
        ("", 2, 3, True, "square"),
        ("", 2, 3, True, "negated"),
        ("", 2, 3, False, "by hand"),
        ("", 2, 3, False, "sum"),
        ("", 2, 3, True, "balanced"),
        ("", 2, 3, True, "shared"),
    ):
        subject = judged(loops.ddp, *args)
        assert (subject.verdict, said(subject)) == (PASS, []), subject.findings
        assert subject.facts["gradients"] == "9 compared by name, step 2 last"
        assert max(subject.errors.values()) < 1e-9


@pytest.mark.medium
def test_a_program_that_is_too_short_for_all_calls_is_started_again(judged: Any, tmp_path: Path) -> None:
    subject = judged(loops.ddp, "", 1, 1)
    assert said(subject) == [], subject.findings
    assert [p.name for p in sorted((tmp_path / "1").glob("alone-*"))] == ["alone-0", "alone-1", "alone-2"]


@pytest.mark.parametrize(
    ("args", "bug", "sentence"),
    [
        (("factor",), "ulysses-scale", "all 9 gradients: 2 times what they should be"),
        (("permuted",), "", "the right numbers in other places: a permutation"),
        (("", 2, 3, False, "means by hand"), "mean-of-means", "contributions are weighted by 1 / their own number of"),
        (("", 1, 3, False, "mean"), "mean-of-means", "contributions are weighted by 1 / their own number of labels"),
        (("", 3, 3, True, "undivided"), "accum-undivided", "all 9 gradients: 3 times what they should be"),
        (("", 3, 3, True, "undivided two"), "accum-undivided", "all 9 gradients: 3 times what they should be"),
    ],
)
def test_what_watching_alone_cannot_tell_is_found(judged: Any, args: tuple[Any, ...], bug: str, sentence: str) -> None:
    subject = judged(loops.ddp, *args)
    (found,) = [f for f in subject.findings if f.verdict == BUG]
    assert (found.bug, sentence in found.sentence) == (bug, True), found
    assert not [f for f in subject.findings if f.verdict == INCONCLUSIVE]


def test_uneven_means_of_micro_batches_are_told_with_the_factor_that_all_share(judged: Any) -> None:
    """Labels on rank 0: 9 and 12, on rank 1: 21 and 24. Each label should weigh 1 / 66."""
    (found,) = [f for f in judged(loops.ddp, "", 2, 3, False, "undivided").findings if f.verdict == BUG]
    assert found.bug == "mean-of-means"
    assert [round(value, 3) for _, value in found.coefficients] == [round(66 / 2 / n, 3) for n in (9, 12, 21, 24)]


@pytest.mark.parametrize("wrong", [True, False])
def test_a_wrong_adjoint_is_found_beside_a_first_step_of_one_device_on_the_same_data(judged: Any, wrong: bool) -> None:
    subject = judged(loops.cut_in_two, wrong)
    assert subject.verdict == (BUG if wrong else PASS), subject.findings
    assert subject.facts["gradients"] == f"9 compared by name, step {1 if wrong else 2} last"


@pytest.mark.parametrize(("flat", "even"), [(False, True), (True, True), (False, False), (True, False)])
def test_fsdp1_is_compared_whole_and_its_mean_of_means_is_named(judged: Any, flat: bool, even: bool) -> None:
    subject = judged(loops.fsdp1, flat, even)
    assert said(subject) == ([] if even else [(BUG, "mean-of-means")]), subject.findings
    assert subject.facts["gradients"] == f"9 compared by name, step {2 if even else 1} last"
    if even:
        assert max(subject.errors.values()) < 1e-5
    else:  # labels on rank 0: 9 and 12, on rank 1: 21 and 24
        (found,) = [f for f in subject.findings if f.verdict == BUG]
        factors = [value for _, value in found.coefficients]
        assert factors == pytest.approx([66 / 4 / n for n in (9, 12, 21, 24)], abs=5e-4)


@pytest.mark.medium
def test_what_a_cut_graph_divides_is_told_as_that_and_nothing_else(judged: Any) -> None:
    subject = judged(field.open_clip, False)
    assert said(subject) == [(BUG, "cut-graph")], subject.findings
    assert "count 0.5 times what they should" in subject.findings[0].sentence


def test_a_loss_that_is_a_dtensor_is_compared(judged: Any) -> None:
    subject = judged(field.column_parallel, 96, "loss_parallel")
    assert (subject.verdict, subject.compared) == (PASS, True), subject.findings


def test_a_run_without_a_step_is_not_started_again(judged: Any, tmp_path: Path) -> None:
    subject = judged(loops.without_step)
    assert subject.findings[0].sentence == "not compared with one device: no optimizer was seen to step"
    assert not list((tmp_path / "1").glob("alone-*"))


@pytest.mark.parametrize(
    ("args", "why", "fix"),
    [
        (("", 1, 3, False, "balanced"), "backward at verify/tests/loops.py", "before the model is called"),
        (("", 1, 3, False, "means"), "the loss has terms whose numbers of elements vary differently", "same data"),
        (("", 1, 3, False, "late"), "backward at verify/tests/loops.py", "before the model is called"),
    ],
)
def test_a_program_that_cannot_be_driven_is_told_what_to_change(
    judged: Any, args: tuple[Any, ...], why: str, fix: str
) -> None:
    subject = judged(loops.ddp, *args)
    assert subject.findings[0].sentence.startswith(f"not compared with one device: {why}"), subject.findings
    assert fix in subject.findings[0].look
    assert subject.verdict != PASS


def test_the_command_with_one_rank() -> None:  # V3
    one = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "1", "train.py", "--num-processes", "8"]
    assert beside.single_rank([*one[:4], "4", *one[5:]]) == one
    assert beside.single_rank(["mpirun", "-np", "4", "train.py"]) == ["mpirun", "-np", "1", "train.py"]
    assert beside.single_rank(["nice", "-n", "8", "torchrun", "--nproc_per_node=2", "a.py"])[2:] == [
        "8", "torchrun", "--nproc_per_node=1", "a.py",
    ]  # fmt: skip
    nodes = ["torchrun", "--nnodes", "2", "--nproc-per-node=4", "a.py"]
    assert beside.single_rank(nodes) == ["torchrun", "--nnodes", "1", "--nproc-per-node=1", "a.py"]
    assert beside.single_rank(["srun", "-N", "2", "--ntasks-per-node=4", "python", "a.py"]) == [
        "srun", "-N", "1", "--ntasks-per-node=1", "python", "a.py",
    ]  # fmt: skip
    own = ["python", "train.py", "--num-processes", "2"]
    assert beside.single_rank(own) == own


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "args", "wrong", "bug"),
    [
        (alone.by_hand, (), "unreduced", ""),
        (alone.by_hand, (0.9,), "undivided", "accum-undivided"),
        (alone.drawn_later, (), "factor", "ulysses-scale"),
        (alone.drawn_later, (False,), "factor", "ulysses-scale"),
        (alone.attributes, (), "factor", "ulysses-scale"),
        (alone.weighed, (), "permuted", ""),
        (alone.ring, (), "factor", "ulysses-scale"),
        (alone.ring, (True,), "permuted", ""),
    ],
)
def test_what_stood_in_the_way_of_one_device_does_no_longer(  # V2
    judged: Any, program: Any, args: tuple[Any, ...], wrong: str, bug: str
) -> None:
    right = judged(program, "", *args)
    assert (right.verdict, right.compared, said(right)) == (PASS, True, []), right.findings
    found = judged(program, wrong, *args)
    assert (found.compared, said(found)) == (True, [(BUG, bug)]), found.findings


@pytest.mark.medium
@pytest.mark.parametrize("wrong", [False, True])
def test_stages_with_equal_names_are_compared_each_by_itself(judged: Any, wrong: bool) -> None:  # V10
    subject = judged(field.zero_bubble, wrong, ranks=4)
    assert (subject.verdict, subject.compared) == (BUG if wrong else PASS, True), subject.findings
    assert subject.facts["gradients"] == f"8 compared by name, step {1 if wrong else 2} last"
    if wrong:
        (found,) = [f for f in subject.findings if f.verdict != NOTE]
        assert "stage3.Sequential.0.weight): not summed over ranks 2, 3" in found.sentence


@pytest.mark.parametrize(
    ("wrong", "verdict", "sentence"),
    [
        ("", PASS, ""),
        ("undivided", BUG, "all 4 gradients: 2 times what they should be"),
        ("order", BUG, "got back the gradient of what another of its calls has made"),
        ("doubled", INCONCLUSIVE, "got back another gradient than the next stage's backward makes on one device"),
        ("joined", INCONCLUSIVE, "in stages_by_hand exchanges may be a part of the loss"),
    ],
)
def test_a_pipeline_by_hand_is_chained_by_what_its_stages_send(
    judged: Any, wrong: str, verdict: str, sentence: str
) -> None:
    subject = judged(field.stages_by_hand, wrong)
    assert subject.verdict == verdict, subject.findings
    assert any(sentence in f.sentence for f in subject.findings), subject.findings
    if verdict == INCONCLUSIVE:
        assert "verify/tests/field.py:" in subject.findings[0].sentence


def test_a_factor_is_open_where_the_loss_has_one_on_one_device_too(judged: Any) -> None:
    """A coefficient of 0.5, or a division by the number of ranks that is written as 2?"""
    subject = judged(alone.weighed, "factor")
    assert said(subject) == [(INCONCLUSIVE, "ulysses-scale")], subject.findings
    assert "in weighed counts 0.5 times there" in subject.findings[0].sentence


def test_labels_that_each_rank_weighs_otherwise_are_no_mean_of_means_where_their_numbers_are_equal(judged: Any) -> None:
    (found,) = [f for f in judged(alone.weighed, "by rank").findings if f.verdict == BUG]
    assert (found.bug, "contributions count unequally" in found.sentence) == ("", True), found


@pytest.mark.parametrize(
    ("program", "args", "line"),
    [
        (alone.never_sent, (), "in never_sent waits for what nobody sends in a world of one"),
        (alone.weighed, ("", 0.5, "sum"), "in weighed is a mean over them or is divided by a fixed number"),
    ],
)
def test_the_line_that_stands_in_the_way_is_named(  # V2
    judged: Any, program: Any, args: tuple[Any, ...], line: str
) -> None:
    found = judged(program, *args).findings[0]
    assert found.verdict == INCONCLUSIVE
    assert "verify/tests/alone.py:" in found.sentence and line in found.sentence


@pytest.mark.medium
@pytest.mark.parametrize("replaced", [False, True])
def test_steps_by_hand_from_a_buffer_that_is_not_read_are_no_bug(
    judged: Any, worlds: Worlds, tmp_path: Path, replaced: bool
) -> None:
    subject = judged(alone.in_one_buffer, replaced)
    assert subject.verdict == INCONCLUSIVE and not [f for f in subject.findings if f.verdict == BUG], subject.findings
    worlds(2).run(partial(first_run, alone.in_one_buffer, str(tmp_path / "alone"), replaced))
    assert [f for f in inspect(tmp_path / "alone").findings if f.verdict == BUG] == []


SPAWNED = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp, torch.nn.functional as F

def main(rank, world_size, place):
    dist.init_process_group("gloo", f"file://{place}/{os.getppid()}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model, own = torch.nn.Linear(6, 3), torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x, y = torch.randn(5, 6, generator=own), torch.randint(3, (5,), generator=own)
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, args=(2, os.path.dirname(__file__)), nprocs=2)
"""


def test_a_program_that_starts_its_ranks_itself_starts_one_beside_one_device(tmp_path: Path) -> None:  # V2, V3
    (tmp_path / "spawned.py").write_text(SPAWNED)
    command = [sys.executable, str(tmp_path / "spawned.py")]
    report, code = run(command, tmp_path / "recording", calls=True)
    subject = beside.judged(tmp_path / "recording", command, report.subjects[0], 60.0)
    assert (code, subject.verdict, subject.compared) == (0, PASS, True), subject.findings
