"""The corpus: every planted bug is named with its id, axis and tensors, and its clean twin is silent."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from isograd_verify.corpus import FRAMEWORKS, PROGRAMS
from isograd_verify.errors import VerifyError
from isograd_verify.judge.analysis import Analysis
from isograd_verify.run import corpus
from isograd_verify.run.corpus import Bench, Planted, every_name, names_it, planted
from isograd_verify.tell import catalogue
from isograd_verify.tell.findings import BUG, NOTE, Finding, Subject

EVERY = {what.name: what for what in every_name([])}
SEEDS = (0,)

# The documented bugs of the field, as the issue lists them.
DOCUMENTED = {
    "ulysses-scale", "ulysses-permute", "nosync-missing", "tie-after-scatter", "norm-unreduced", "router-unreduced",
    "qknorm-unreduced", "kv-replica-unreduced", "mean-of-means", "accum-overwritten", "accum-rereduced",
    "accum-undivided", "pp-scale", "expert-scale", "expert-twice", "bias-n-times", "gather-backward-sum", "cut-graph",
    "wrong-group", "clip-per-rank", "norm-counts-replicas", "overflow-alone", "bf16-reduction", "shared-module",
    "bf16-accumulation", "temperature-scale", "cache-rng", "loss-labels-shifted", "norm-dropout-rng",
    "resume-other-rank", "score-partial", "gather-cut", "expert-none", "shared-gate", "norm-omits-experts",
    "ep-copies-drift", "aux-times-world", "aux-times-micro", "aux-over-dp", "bias-per-micro", "bias-twice",
    "recompute-flip",
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EVERY)
def test_a_planted_bug_is_named_and_its_clean_twin_is_silent(bench: Bench, name: str, seed: int) -> None:
    outcome = bench.outcome(EVERY[name], seed)
    said = [f"{f.verdict} {f.bug} over {f.axis}: {f.sentence}" for f in outcome.others]
    assert outcome.caught is not None, said
    assert outcome.caught.sentence
    assert outcome.caught.cause, "what usually causes it"
    assert outcome.caught.look, "where to look"
    assert outcome.alarms == ()
    assert outcome.ok
    accused = {f.bug for f in outcome.others if f.verdict == BUG and f.bug}
    assert accused <= {EVERY[name].bug}, "no other bug is named beside it"


@pytest.mark.medium
def test_the_worked_example_of_the_page_is_what_the_recording_holds(bench: Bench) -> None:
    example = (Path(__file__).parents[1] / "docs" / "verify.md").read_text().partition("### Worked example")[2]
    shown = [[float(n) for n in re.findall(r"-?0\.\d+", row)] for row in re.findall(r"^\| rank \d .*", example, re.M)]
    what = EVERY["accum-rereduced"]
    step = Analysis(bench.watch(what, 2, True, 0), 1)
    parts = [[float(step.parts["norm.weight"][rank, micro][0]) for micro in range(3)] for rank in range(2)]
    sign = parts[0][0] / shown[0][0]  # a sketch of so few numbers is these, or minus these
    assert sign == pytest.approx(math.copysign(1, sign), rel=1e-4)
    assert parts == [pytest.approx([sign * n for n in row], rel=1e-3) for row in shown]
    right, wrong = sum(map(sum, shown)), sum(2 ** (2 - micro) * row[micro] for row in shown for micro in range(3))
    assert float(step.sums[0]["norm.weight"][0]) == pytest.approx(sign * wrong, rel=1e-3)
    told = re.search(r"sum of all six is (\S+), .* what reached the optimizer is (\S+)\. ", tidy(example))
    assert told is not None
    assert [float(n) for n in told.groups()] == pytest.approx([right, wrong], abs=5e-7)  # of rounded numbers
    caught = bench.outcome(what, 0).caught
    assert caught is not None
    bars = ", ".join(f"{label}: {value:g}" for label, value in caught.coefficients)
    sentence = caught.sentence.partition(" (error up to")[0]  # the example has no reference
    assert f"BUG accum-rereduced: {sentence} coefficients: {bars}" in tidy(example)


def tidy(text: str) -> str:
    return " ".join(text.split())


def test_a_bug_in_a_package_that_is_not_installed_is_left_out_and_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    assert not any(what.name.startswith("hugging") for what in every_name([]))
    assert [what.name for what in every_name(["expert-scale"])] == ["experts/expert-scale"]
    with pytest.raises(VerifyError, match="IG741"):
        every_name(["hugging-idle"])


def test_every_documented_bug_is_in_the_corpus() -> None:
    held = {what.bug for what in EVERY.values()}
    assert held >= DOCUMENTED
    assert held - DOCUMENTED == {
        "unowned",
        "same-data",
        "dead-model",
        "adapter-unreduced",
        "copies-begin-apart",
        "rates-differ",
        "averages-differ",
        "border-labels-lost",
    }  # found by checks of their own, and no bugs of frameworks


def test_the_catalogue_for_readers_tells_every_documented_bug() -> None:
    text = (Path(__file__).parents[1] / "docs" / "bugs.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)) >= DOCUMENTED


def test_the_pages_for_readers_count_what_is_planted() -> None:
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/status.md"):
        assert re.findall(r"(\d+) planted bugs", (root / page).read_text()) == [str(len(EVERY))]


def test_every_bug_that_is_planted_has_its_cause_and_place_in_the_catalogue() -> None:
    assert {what.bug for what in EVERY.values()} <= set(catalogue.BUGS)
    for known in catalogue.BUGS.values():
        assert known.cause and known.look


@pytest.mark.parametrize("name", (*PROGRAMS, *FRAMEWORKS))
def test_a_program_tells_its_story_and_whom_to_name(name: str) -> None:
    for what in planted(name):
        assert what.module.__doc__
        assert len(what.module.__doc__) > 60
        assert what.module.WORLD in (2, 3, 4)
        assert re.compile(what.axis)
        assert re.compile(what.tensors)


def test_the_bugs_of_the_command_line_are_found_by_id_framework_or_both() -> None:
    assert [p.name for p in every_name(["wrong-group"])] == ["wrong-group"]
    assert [p.name for p in every_name(["fsdp2/clip-per-rank", "order-none"][:1])] == ["fsdp2/clip-per-rank"]
    assert {p.name.partition("/")[0] for p in every_name(["ddp"])} == {"ddp"}
    both = ["experts/expert-scale", "hugging-experts/expert-scale"]
    assert [p.name for p in every_name(["expert-scale"])] == [name for name in both if name in EVERY]
    assert len(every_name(["ddp"])) > 3
    assert len(EVERY) == len(every_name([])) == len({p.name for p in every_name([])})


def test_an_unknown_bug_is_refused_with_the_nearest() -> None:
    with pytest.raises(VerifyError, match="IG740: no bug 'mean-of-mean' in the corpus") as error:
        every_name(["mean-of-mean"])
    assert "did you mean 'mean-of-means'?" in str(error.value)


NAMED = Finding(BUG, "wrong-group", "", tensors=("up.weight", "down.weight"), axis="tp")
UP: Planted = EVERY["wrong-group"]


@pytest.mark.parametrize(
    ("finding", "ok"),
    [
        (NAMED, True),
        (Finding(NOTE, "wrong-group", "", NAMED.tensors, "tp"), False),
        (Finding(BUG, "nosync-missing", "", NAMED.tensors, "tp"), False),
        (Finding(BUG, "wrong-group", "", NAMED.tensors, "micro-batches"), False),
        (Finding(BUG, "wrong-group", "", ("up.weight",), "tp"), False),
        (Finding(BUG, "wrong-group", "", (*NAMED.tensors, "norm.weight"), "tp"), False),
    ],
)
def test_a_bug_counts_as_named_only_with_its_id_axis_and_exactly_its_tensors(finding: Finding, ok: bool) -> None:
    tensors = [n for n in ("up.weight", "down.weight", "norm.weight") if n == "norm.weight" or re.search(UP.tensors, n)]
    subject = Subject("dp2 tp2", 4, errors=dict.fromkeys(tensors, 0.5))
    assert names_it(finding, UP, subject) is ok
