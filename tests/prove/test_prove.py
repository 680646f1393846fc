"""verify(case, layouts): right cases pass, planted bugs are named, and what cannot be proven is said not to be."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

import isograd as ig
from isograd.core.contract import declare
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.errors import LaunchError, LayoutError, VerifyError
from isograd.launcher.launch import World
from isograd.models import TransformerConfig
from isograd.prove import prove, slopes
from isograd.prove.builtin_cases import language_model
from isograd.prove.case import Case
from isograd.prove.prove import assert_same_gradients, make, one_device, verify
from isograd.prove.slopes import taylor_test
from isograd_verify.compare.compare import compare
from isograd_verify.corpus.plain import Mlp, ShardedMlp, cross_entropy, my_rows, seeded, valid
from isograd_verify.corpus.plain import batch as uneven
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS
from isograd_verify.tell.report import Report

TINY = TransformerConfig(vocab=31, hidden=8, layers=1, heads=2, head_dim=4, mlp=11)
NORMS = ("blocks.0.norm1.weight", "blocks.0.norm2.weight", "norm.weight")


pytestmark = pytest.mark.usefixtures("lent")


# -- cases ---------------------------------------------------------------------------------------------------------


def tiny(mesh: Mesh) -> Case:
    return language_model(TINY, mesh)


def forgetful(mesh: Mesh) -> Case:
    """The norms' contracts do not say that their gradients are sums over tp."""
    case = tiny(mesh)
    for name, parameter in case.model.named_parameters():
        if name in NORMS:
            declare(parameter, mesh, shape=tuple(parameter.shape), partial_over=())
    return case


def by_hand(plant: str, mesh: Mesh) -> Case:
    """A foreign program: rows over data ranks, gradients summed by a plain all-reduce."""
    tokens, labels = uneven(0)
    return Case(seeded(Mlp, 3), {"tokens": tokens, "labels": labels}, step=partial(foreign_step, plant))


def foreign_step(plant: str, model: nn.Module, batch: dict[str, Tensor], mesh: Mesh) -> None:
    index, ranks = mesh.index("dp"), mesh.size("dp")
    tokens, labels = (my_rows(batch[key], index, ranks) for key in ("tokens", "labels"))
    if plant == "mean of means":
        loss = cross_entropy(model(tokens), labels, "mean") / ranks
    else:
        loss = cross_entropy(model(tokens), labels) / valid(batch["labels"])
    if plant.endswith("times") and ranks > 1:
        loss = float(plant.removesuffix("times")) * loss
    loss.backward()
    for parameter in model.parameters():
        if ranks > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)


class OnOne(ShardedMlp):
    """The same on one device, which has nobody to talk to."""

    def shard(self) -> None:
        """All of it stays here."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def sharded(plant: str, mesh: Mesh) -> Case:
    """Tensor parallelism in plain tensors: which of them are shards, and of what, only the program knows."""
    model = seeded(ShardedMlp if mesh.size("tp") > 1 else OnOne, 3)
    tokens, labels = uneven(0)
    return Case(model, {"tokens": tokens, "labels": labels}, step=partial(sharded_step, plant), clip=0.05)


def sharded_step(plant: str, model: nn.Module, batch: dict[str, Tensor], mesh: Mesh) -> None:
    (cross_entropy(model(batch["tokens"]), batch["labels"]) / valid(batch["labels"])).backward()
    if plant == "a clip per rank" and mesh.size("tp") > 1:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def even(mesh: Mesh) -> Case:
    """A mean over rows, of no labels at all."""
    x = torch.arange(40, dtype=torch.float64).reshape(8, 5).sin()
    model = seeded(nn.Linear, 1, 5, 3)
    return Case(model, x, loss=lambda model, part: model(part).square().mean())


def same_counts(mesh: Mesh) -> Case:
    """Every token has a label."""
    tokens, _ = uneven(0)
    batch = {"tokens": tokens, "labels": tokens.flip(1)}
    return Case(seeded(Mlp, 3), batch, loss=lambda m, part: cross_entropy(m(part["tokens"]), part["labels"], "mean"))


def full(mesh: Mesh) -> Case:
    """One backward on each rank, and every token has a label."""
    case = sharded("", mesh) if mesh.size("tp") > 1 else by_hand("", mesh)
    return replace(case, batch={**case.batch, "labels": case.batch["tokens"].flip(1)})


def raising(mesh: Mesh) -> Case:
    if mesh.rank == 1:
        raise ValueError("the labels of rank 1 are gone")
    return tiny(mesh)


def two_blocks(mesh: Mesh) -> Case:
    return language_model(replace(TINY, layers=2), mesh)


def four_blocks(mesh: Mesh) -> Case:
    return language_model(replace(TINY, layers=4), mesh)


def unseeded(mesh: Mesh) -> Case:
    torch.seed()
    return Case(nn.Linear(5, 3), torch.ones(4, 5), loss=lambda model, part: model(part).square().mean())


def forgets_labels(mesh: Mesh) -> Case:
    """The loss of each part is a mean over its labels, and says that it is over its rows."""
    case = two_blocks(mesh)
    return Case(case.model, case.batch, loss=lambda model, part: model(**part)[0])


def two_terms(mesh: Mesh) -> Case:
    """The mean over all labels, and one over some of them, which not every part has."""
    case = tiny(mesh)

    def loss(model: nn.Module, part: dict[str, Tensor]) -> Terms:
        some = torch.where(part["labels"] % 5 == 0, part["labels"], -100)
        return Terms(lm=model(**part), some=(*model(**{**part, "labels": some}), 0.5))

    return Case(case.model, case.batch, loss=loss)


def no_case(mesh: Mesh) -> Any:
    return nn.Linear(5, 3)


def few(mesh: Mesh) -> Case:
    return language_model(TINY, mesh, rows=3)


# -- what passes ---------------------------------------------------------------------------------------------------


def test_a_right_case_passes_under_every_layout_and_says_how_nearly() -> None:
    report = ig.verify(tiny, "tp2 sp; dp2 zero1; tp2 dp2 zero2 sp")
    assert report.verdict == PASS, str(report)
    assert report.ok
    assert bool(report)
    assert report.exit_code == 0
    assert report.findings() == report.findings(INCONCLUSIVE) == []
    assert [(s.name, s.world) for s in report.subjects] == [("tp2 sp", 2), ("dp2 zero1", 2), ("dp2 tp2 sp zero2", 4)]
    for subject in report.subjects:
        assert subject.compared
        assert set(NORMS) < set(subject.errors)
        assert len(subject.errors) == 12
        assert max(subject.errors.values()) < 1e-12
        assert "relative difference" in subject.facts["loss"]
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    assert data["verdict"] == PASS
    assert data["title"] == "gradients of tiny under 3 layouts against one device, float64"
    assert [s["verdict"] for s in data["subjects"]] == [PASS] * 3
    assert "3 PASS, 0 BUG, 0 INCONCLUSIVE" in str(report)


def test_a_loss_of_several_terms_passes() -> None:
    report = verify(two_terms, "dp2 zero1; tp2 sp")
    assert report.ok, str(report)
    assert slopes.taylor_test(two_terms, "dp2 zero1").ok


def test_layouts_may_be_a_list_and_one_device_is_a_layout_too() -> None:
    report = verify(tiny, ["1", "dp2"])
    assert [(s.name, s.verdict) for s in report.subjects] == [("1", PASS), ("dp2", PASS)]


def test_progress_is_told_step_by_step() -> None:
    told: list[str] = []
    verify(tiny, "dp2", progress=told.append)
    assert told == ["one device, batch in the pieces of 2 data rank(s)", "dp2"]


@pytest.mark.medium
def test_a_foreign_program_that_divides_once_passes() -> None:
    report = verify(partial(by_hand, ""), "dp2")
    assert report.verdict == PASS, str(report)
    assert len(report.subjects[0].errors) == 9
    assert report.title == "gradients of by_hand under dp2 against one device, float64"


def test_the_harness_clips_shards_by_the_norm_of_the_whole() -> None:
    report = verify(partial(sharded, ""), "tp2")
    assert report.verdict == PASS, str(report)
    assert report.findings(NOTE) == []


def test_a_case_that_clips_its_own_shards_by_a_norm_per_rank_is_named() -> None:
    report = verify(partial(sharded, "a clip per rank"), "tp2")
    assert [f.bug for f in report.findings()] == ["clip-per-rank"]


def test_equal_counts_that_would_hide_a_mean_of_means_are_noted() -> None:
    report = verify(same_counts, "dp2")
    assert report.verdict == PASS, str(report)
    (note,) = report.findings(NOTE)
    assert "every rank and micro-batch has the same number of labels" in note.sentence
    assert verify(tiny, "dp2").findings(NOTE) == []


def test_one_data_rank_with_one_micro_batch_has_no_means_to_be_averaged() -> None:
    counts = {}
    for layout in ("dp2", "tp2"):
        report = verify(full, layout)
        counts[layout] = ["same number of labels" in note.sentence for note in report.findings(NOTE)]
    assert counts == {"dp2": [True], "tp2": []}


def test_recordings_are_kept_on_request_and_can_be_compared_again(tmp_path: Path) -> None:
    verify(tiny, "tp2 sp", keep=tmp_path)
    reference, candidate = Recording(tmp_path / "one-device-1-0"), Recording(tmp_path / "tp2_sp")
    assert candidate.about["layout"] == "tp2 sp"
    assert compare(reference, candidate).verdict == PASS


def test_a_file_and_worlds_of_its_own_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[World] = []

    class Counted(World):
        def __init__(self, ranks: int) -> None:
            super().__init__(ranks)
            made.append(self)

    monkeypatch.setattr(prove, "World", Counted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    file = tmp_path / "my_case.py"
    file.write_text("from tests.prove.test_prove import even\n\ndef mine(mesh):\n    return even(mesh)\n")
    report = verify(f"{file}:mine", "dp2")
    assert report.verdict == PASS, str(report)
    assert report.title.startswith(f"gradients of {file}:mine")
    assert [world.pids for world in made] == [[]] * len(made)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_case_in_a_file_imports_its_neighbours_when_it_is_made_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "rows_beside_it.py").write_text("ROWS = 3\n")
    (tmp_path / "loss_beside_it.py").write_text("def square(model, part):\n    return model(part).square().mean()\n")
    (tmp_path / "case.py").write_text(
        "import torch\nfrom isograd.prove import Case\nfrom rows_beside_it import ROWS\n\n"
        "def loss(model, part):\n    from loss_beside_it import square\n    return square(model, part)\n\n"
        "def case(mesh):\n    return Case(torch.nn.Linear(2, 1), torch.ones(ROWS, 2), loss=loss)\n"
    )
    made = make(f"{tmp_path / 'case.py'}:case", Mesh("1"), torch.float64)
    assert made.rows == 3
    assert made.mean(made.batch)[1] == 3
    make(f"{tmp_path / 'case.py'}:case", Mesh("1"), torch.float64)
    assert sys.path.count(str(tmp_path)) == 1


# -- what is a bug -------------------------------------------------------------------------------------------------


def test_a_contract_that_forgets_a_debt_is_named_with_its_tensors_and_axis() -> None:
    report = verify(forgetful, "dp2; tp2 sp")
    assert [s.verdict for s in report.subjects] == [PASS, BUG]
    assert (report.verdict, report.ok, report.exit_code) == (BUG, False, 3)
    (found,) = report.findings()
    assert (found.bug, found.axis, set(found.tensors)) == ("norm-unreduced", "tp", set(NORMS))
    assert "not summed over tp: each rank holds its own part only" in found.sentence
    assert found.sentence.startswith("step 1: norms (")
    wrong = {name for name, error in report.subjects[1].errors.items() if error > 1e-9}
    assert wrong == set(NORMS)
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    assert [s["verdict"] for s in data["subjects"]] == [PASS, BUG]
    assert data["subjects"][1]["findings"][0]["bug"] == "norm-unreduced"


def test_a_foreign_mean_of_means_is_named() -> None:
    report = verify(partial(by_hand, "mean of means"), "dp2")
    assert (report.verdict, report.exit_code) == (BUG, 3)
    (found,) = report.findings()
    assert found.bug == "mean-of-means"
    assert len(found.tensors) == 9
    assert "contributions are weighted by 1 / their own number of labels" in found.sentence


def test_an_assertion_has_the_report_as_its_message() -> None:
    assert isinstance(assert_same_gradients(tiny, "dp2"), Report)
    with pytest.raises(AssertionError) as error:
        assert_same_gradients(partial(by_hand, "mean of means"), "dp2")
    assert "BUG mean-of-means: step 1: all 9 gradients" in str(error.value)
    assert "usual cause:" in str(error.value)


def test_a_loss_over_labels_that_is_weighed_by_rows_is_not_one_devices() -> None:
    """Both sides weigh alike here, so gradients agree: the case's own loss is the definition."""
    assert verify(forgets_labels, "dp2").verdict == PASS


# -- what cannot be told -------------------------------------------------------------------------------------------


def test_a_case_that_is_not_itself_twice_is_inconclusive() -> None:
    report = verify(unseeded, "dp2")
    assert (report.verdict, report.exit_code, report.ok) == (INCONCLUSIVE, 4, False)
    (found,) = report.findings(INCONCLUSIVE)
    assert found.sentence.startswith("the case is not deterministic: two runs on one device differ in 2 gradients of")
    assert set(found.tensors) == {"weight", "bias"}
    data = json.loads(json.dumps(report.data(), allow_nan=False))
    assert data["verdict"] == INCONCLUSIVE
    assert data["subjects"][0]["name"] == "one device, run twice"


def test_a_case_that_raises_on_one_rank_shows_that_traceback_first() -> None:
    with pytest.raises(LaunchError) as error:
        verify(raising, "dp2")
    text = str(error.value).lstrip()
    assert text.startswith("Traceback (most recent call last):")
    head = text.partition("IG253")[0]
    assert "ValueError: the labels of rank 1 are gone" in head
    assert "rank 1 of 2 raised the above first" in text


# -- narrower numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_program_is_one_of_the_ensemble_in_its_working_precision(dtype: torch.dtype) -> None:
    report = verify(partial(by_hand, ""), "dp2", dtype=dtype)
    assert report.verdict == PASS, str(report)
    assert max(report.subjects[0].errors.values()) > 1e-9, "nothing was rounded: not the precision that was asked for"
    assert report.title.endswith(str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(
    ("dtype", "factor", "verdicts"),
    [
        pytest.param(torch.float32, 1.01, {BUG}, id="fp32, one percent"),
        pytest.param(torch.bfloat16, 1.1, {BUG}, id="bf16, ten percent"),
        pytest.param(torch.bfloat16, 1.01, {BUG, INCONCLUSIVE}, id="bf16, one percent"),
    ],
)  # fmt: skip
def test_a_wrong_scale_is_not_taken_for_rounding(dtype: torch.dtype, factor: float, verdicts: set[str]) -> None:
    report = verify(partial(by_hand, f"{factor} times"), "dp2", dtype=dtype)
    assert report.verdict in verdicts, str(report)
    assert not report.ok
    told = [f for f in report.findings(report.verdict) if f.tensors]
    assert told
    if dtype == torch.float32:
        assert "all 9 gradients: 1.01 times what they should be" in told[0].sentence


# -- what is refused -----------------------------------------------------------------------------------------------


def test_too_few_rows_for_all_micro_batches_are_refused() -> None:
    with pytest.raises(LaunchError, match="IG734: a case's batch has too few rows") as error:
        verify(few, "dp2")
    assert "3 rows for 4 parts" in str(error.value)
    with pytest.raises(VerifyError, match="IG734"):
        few(Mesh.unbound("1")).parts(4)


def mean(model: nn.Module, part: Any) -> Tensor:
    result: Tensor = model(part).mean()
    return result


def step(model: nn.Module, batch: Any, mesh: Mesh) -> None:
    mean(model, batch).backward()


def test_a_case_has_a_loss_or_a_step_and_not_both() -> None:
    with pytest.raises(VerifyError, match="IG730: a case has a loss, or a step of its own, not both"):
        Case(nn.Linear(5, 3), torch.ones(4, 5), loss=mean, step=step)


def test_a_pipeline_is_proven_when_the_model_computes_its_loss() -> None:
    report = verify(four_blocks, "pp2 vpp2; dp2 pp2 zb zero1")
    assert [subject.verdict for subject in report.subjects] == [PASS, PASS], report
    with pytest.raises(LaunchError, match="IG735"):
        verify(forgets_labels, "pp2")


@pytest.mark.parametrize(
    "batch",
    [{"x": torch.ones(4, 5), "y": torch.ones(3)}, [torch.ones(2, 3), (torch.ones(3, 2),)], {}, torch.tensor(1.0)],
)
def test_a_batch_without_a_common_number_of_rows_is_refused(batch: Any) -> None:
    with pytest.raises(VerifyError, match="IG731"):
        Case(nn.Linear(5, 3), batch, loss=mean)


def test_a_batch_is_cut_into_parts_of_rows_whatever_its_nest() -> None:
    batch = {
        "x": torch.arange(7),
        "more": [(torch.arange(14).reshape(7, 2), "not per sample")],
        "scale": torch.tensor(2),
    }
    case = Case(nn.Linear(5, 3), batch, loss=mean)
    parts = case.parts(3)
    assert case.rows == 7
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(part["more"][0][0]) for part in parts] == [3, 2, 2]
    assert parts[1]["more"][0][1] == "not per sample"
    assert int(parts[2]["scale"]) == 2


def test_an_unknown_function_of_a_file_is_refused_with_those_there_are(tmp_path: Path) -> None:
    file = tmp_path / "cases.py"
    file.write_text("def llama(mesh): ...\ndef gpt(mesh): ...\nnumber = 3\n")
    with pytest.raises(VerifyError, match="IG732") as error:
        make(f"{file}:lama", Mesh.unbound("1"), torch.float64)
    assert f"{file} has no 'lama'" in str(error.value)
    assert "['llama', 'gpt']" in str(error.value)


def test_a_function_that_returns_no_case_is_refused() -> None:
    with pytest.raises(VerifyError, match="IG733: a case function must return a Case") as error:
        make(no_case, Mesh.unbound("1"), torch.float64)
    assert "Linear" in str(error.value)


def test_a_case_is_brought_into_the_precision_of_the_proof() -> None:
    case = make(even, Mesh.unbound("1"), torch.float32)
    assert {p.dtype for p in case.model.parameters()} == {torch.float32}
    assert case.batch.dtype == torch.float32
    tokens = make(partial(by_hand, ""), Mesh.unbound("1"), torch.float32).batch["tokens"]
    assert tokens.dtype == torch.int64


def test_a_layout_that_contradicts_itself_is_refused_before_anything_runs() -> None:
    told: list[str] = []
    with pytest.raises(LayoutError):
        verify(tiny, "dp2; tp0", progress=told.append)
    assert told == []


# -- the Taylor test -----------------------------------------------------------------------------------------------


def test_the_gradient_of_a_right_layout_is_the_slope_of_its_loss() -> None:
    report = taylor_test(tiny, "tp2 sp; dp2 zero1")
    assert report.verdict == PASS, str(report)
    assert [s.name for s in report.subjects] == ["tp2 sp", "dp2 zero1"]
    assert set(report.subjects[0].errors) == {n.replace(".0.", ".*.") for n in report.subjects[0].errors}
    assert max(report.subjects[0].errors.values()) < 1e-6


def test_a_missing_sum_is_seen_without_any_reference() -> None:
    report = taylor_test(forgetful, "tp2 sp")
    assert report.verdict == BUG
    classes = {f.tensors[0] for f in report.findings()}
    assert classes == {"blocks.*.norm1.weight", "blocks.*.norm2.weight", "norm.weight"}
    assert "along a random direction the loss changes by" in report.findings()[0].sentence


def modes_left(home: str) -> int:
    """How many dispatch modes an ensemble's run leaves behind in its rank."""
    before = _len_torch_dispatch_stack()
    one_device(partial(by_hand, ""), 1, torch.float32, home, terms=2)
    return _len_torch_dispatch_stack() - before


def test_a_run_of_the_ensemble_leaves_no_mode_behind(worlds: Callable[[int], World], tmp_path: Path) -> None:
    assert worlds(1).run(partial(modes_left, str(tmp_path))) == [0]
