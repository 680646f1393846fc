"""Programs in the forms of public libraries (public.py): what is said of the right form, and of the wrong one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isograd_verify.judge import checks
from isograd_verify.record import events
from isograd_verify.record.events import Collective
from isograd_verify.run.attach import inspect
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Subject
from isograd_verify.watch import foreign

from . import field, public
from .recordings import Held, Step, numbers, write
from .test_beside import judged, said

__all__ = ["judged"]
Worlds = Callable[[int], LocalRanks]


def watched(worlds: Worlds, home: Path, program: Callable[..., None], *args: Any, ranks: int = 2) -> Subject:
    worlds(ranks).run(partial(field.watched, program, str(home), *args))
    return inspect(home)


@pytest.mark.parametrize("kind", ["rows", "noise", "mask"])
def test_gradients_that_a_program_changes_itself_are_judged_as_they_were(
    worlds: Worlds, tmp_path: Path, kind: str
) -> None:
    subject = watched(worlds, tmp_path, public.own_changes, kind)
    assert (subject.verdict, said(subject)) == (PASS, []), subject.findings
    (note,) = [f for f in subject.findings if "changed by the program itself" in f.sentence][:1]
    assert note.verdict == NOTE
    assert "public.py" in note.sentence
    assert "0.weight" in note.tensors


@pytest.mark.parametrize(("kind", "bug"), [("half", "divided-twice"), ("cut", "cut-graph")])
def test_a_change_by_a_factor_with_a_meaning_is_told(worlds: Worlds, tmp_path: Path, kind: str, bug: str) -> None:
    subject = watched(worlds, tmp_path, public.own_changes, kind)
    assert said(subject) == [(BUG, bug)], subject.findings
    assert subject.findings[0].tensors == ("0.weight",)


def test_gradients_that_are_copied_back_are_no_change(worlds: Worlds, tmp_path: Path) -> None:
    assert watched(worlds, tmp_path, public.copied_back).findings == []


@pytest.mark.parametrize("cut", [False, True])
def test_what_fp16_makes_zero_is_not_cut_off(worlds: Worlds, tmp_path: Path, cut: bool) -> None:
    subject = watched(worlds, tmp_path, public.half_precision_hook, cut)
    found = {f.bug: f.tensors for f in subject.findings if f.verdict == BUG}
    assert set(found) == {"bf16-reduction", *(["cut-graph"] if cut else [])}, subject.findings
    if cut:
        assert found["cut-graph"] == ("inner.bias",)


@pytest.mark.parametrize("right", [True, False])
def test_a_loss_that_is_computed_with_every_micro_batch(worlds: Worlds, tmp_path: Path, right: bool) -> None:
    subject = watched(worlds, tmp_path, public.accumulated_pairs, right)
    assert said(subject) == ([] if right else [(BUG, "temperature-scale")]), subject.findings
    if not right:
        assert dict(subject.findings[0].coefficients)["logit_scale"] == pytest.approx(3)
        assert subject.findings[0].axis == "micro-batches"


@pytest.mark.medium
@pytest.mark.parametrize("wrong", [False, True])
def test_rows_that_are_cut_by_tensor_parallelism_and_then_by_fsdp2(worlds: Worlds, tmp_path: Path, wrong: bool) -> None:
    subject = watched(worlds, tmp_path, public.sharded_twice, wrong, ranks=4)
    assert said(subject) == ([(BUG, "mean-of-means")] if wrong else []), subject.findings


# -- beside one device -------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("right", [True, False])
def test_a_loss_over_the_rows_of_all_ranks_is_given_them_together(judged: Any, right: bool) -> None:
    subject = judged(public.loss_inside, right)
    assert subject.verdict == (PASS if right else BUG), subject.findings
    assert any("in one batch" in f.sentence for f in subject.findings)
    if not right:
        assert "0.5 times what they should be" in subject.findings[0].sentence


@pytest.mark.medium
@pytest.mark.parametrize("scaled", [True, False])
def test_a_loss_that_every_rank_computes_as_a_whole_is_judged_by_its_labels(
    worlds: Worlds, tmp_path: Path, scaled: bool
) -> None:
    subject = watched(worlds, tmp_path, public.cached, scaled)
    assert said(subject) == ([] if scaled else [(BUG, "cut-graph")]), subject.findings
    if not scaled:
        assert "all gradients count 0.5 times what they should" in subject.findings[0].sentence


@pytest.mark.medium
@pytest.mark.parametrize("scaled", [True, False])
def test_a_loss_of_representations_without_a_graph_is_given_all_rows_together(judged: Any, scaled: bool) -> None:
    subject = judged(public.cached, scaled)
    assert subject.verdict == (PASS if scaled else BUG), subject.findings
    assert any("in one batch" in f.sentence for f in subject.findings)
    if not scaled:
        assert "0.5 times what they should be" in subject.findings[0].sentence


@pytest.mark.parametrize("wrong", [False, True])
def test_a_step_with_a_closure_is_done_again_on_one_device(judged: Any, wrong: bool) -> None:
    subject = judged(public.with_closure, wrong)
    assert said(subject) == ([(BUG, "ulysses-scale")] if wrong else []), subject.findings
    assert "compared by name" in subject.facts["gradients"]


def test_a_pipeline_is_compared_with_its_own_first_step_on_one_device(judged: Any) -> None:
    subject = judged(public.piped, True)
    assert (subject.verdict, said(subject)) == (PASS, []), subject.findings
    assert subject.facts["gradients"] == "3 compared by name, step 1 last"


# -- on one process ----------------------------------------------------------------------------------------------


def test_parameters_that_megatron_has_cut_say_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 1, get_tensor_model_parallel_world_size=lambda: 2)
    bias = nn.Parameter(torch.zeros(6))
    bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1
    assert (foreign.box_of(bias), foreign.whole_shape(bias)) == (None, (6,))
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert (foreign.box_of(bias), foreign.whole_shape(bias)) == (((6, 12),), (12,))
    assert foreign.box_of(nn.Parameter(torch.zeros(6))) is None


# -- recordings by hand ------------------------------------------------------------------------------------------


def reduction(group: tuple[int, ...], size: int = 30) -> Collective:
    return Collective(
        0, n=1, op="all_reduce", group=group, dtype="float64", numel=size, bytes=8 * size, start=0.0,
        phase="backward", module="", site="train.py:9", covers=(), passed=0,
    )  # fmt: skip


def held(rank: int, own: bool = False) -> dict[str, Held]:
    parts = [numbers(5, 6, seed=r + 1) for r in range(2)]
    return {"up.weight": Held(numbers(5, 6), parts[rank] if own else parts[0] + parts[1], parts={0: parts[rank]})}


@pytest.mark.parametrize("equal", [True, False])
def test_collectives_that_were_not_seen_are_not_left_out(tmp_path: Path, equal: bool) -> None:
    """PowerSGD's hook: callbacks reduce in other threads, where nobody sees some of them; the group counts them."""
    ranks = []
    for rank in range(2):
        both = [reduction((0, 1)), reduction((0, 1), 7)]
        steps = [Step(held(rank), events=[reduction((0, 1))]), Step(held(rank), events=both[: 1 + rank])]
        ranks.append(steps)
    recording = write(tmp_path, ranks)
    for rank, record in enumerate(recording.ranks):
        counts = iter(({"0,1": 2}, {"0,1": 4 if equal or rank else 3}))
        told = [replace(e, issued=next(counts)) if isinstance(e, events.Step) else e for e in record.events]
        record.events[:] = told
    found = [f.bug for f in checks.check(recording) if f.verdict == BUG]
    assert found == ([] if equal else ["order"])


@pytest.mark.parametrize("smaller", [True, False])
def test_sums_over_fewer_ranks_than_before_are_local_steps(tmp_path: Path, smaller: bool) -> None:
    """Local SGD stops summing gradients after some steps. One that sums no more at all has forgotten to."""
    later = [[reduction((rank,))] if smaller else [] for rank in range(2)]
    ranks = [
        [Step(held(rank), events=[reduction((0, 1))]), Step(held(rank, own=True), events=later[rank])]
        for rank in range(2)
    ]
    (found,) = [f for f in checks.check(write(tmp_path, ranks)) if f.verdict in (BUG, INCONCLUSIVE)]
    if smaller:
        assert (found.verdict, found.axis) == (INCONCLUSIVE, "ranks 0, 1")
        assert "local SGD" in found.sentence
    else:
        assert (found.verdict, found.bug) == (BUG, "nosync-missing")
