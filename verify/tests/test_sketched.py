"""Recordings by sketches alone: compared with whole ones and with each other, they show what whole ones show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from isograd_verify.compare.compare import compare
from isograd_verify.record import events
from isograd_verify.record.recording import Recording
from isograd_verify.run.corpus import Bench, every_name
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject
from isograd_verify.watch.capture import Capture

from .field import rows, seeded
from .recordings import Held, Step, write
from .test_compare import EVEN, FUSED, SHAPES, UNEVEN, changed, part, right, rows_of, tensor_parallel

Worlds = Callable[[int], LocalRanks]

FORMS = {"a whole reference": (None, 0), "a whole candidate": (0, None), "both by sketches": (0, 0)}
MATRICES = ("embed.weight", "up.weight", "down.weight")


def judged(home: Path, form: str, ranks: list[list[Step]], layout: str = "dp2") -> Subject:
    theirs, ours = FORMS[form]
    reference = write(home / "reference", right(data_ranks=1), "1", theirs)
    return compare(reference, write(home / "candidate", ranks, layout, ours))


def only(subject: Subject, verdict: str = BUG) -> Finding:
    (found,) = [f for f in subject.findings if f.verdict != NOTE]
    assert found.verdict == verdict, found.sentence
    return found


def test_a_recording_by_sketches_holds_no_matrix(tmp_path: Path) -> None:
    tensors = write(tmp_path, right(), beyond=0).ranks[0].tensors(1)
    assert {t.dim() for name, t in tensors.items() if name.startswith(("final/", "parameter/", "after/"))} == {1}
    assert all(f"along/final/{d}/{name}" in tensors for name in MATRICES for d in (0, 1))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_step_on_two_data_ranks_passes(tmp_path: Path, form: str) -> None:
    subject = judged(tmp_path, form, right())
    assert subject.findings == []
    assert set(subject.errors) == set(SHAPES)
    assert max(subject.errors.values()) < 1e-12


@pytest.mark.medium
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("cuts", "boxes"), [(EVEN, False), (EVEN, True), (FUSED, False), (UNEVEN, False), ({**EVEN, **UNEVEN}, True)]
)
def test_shards_are_put_in_their_places_by_the_sums_of_their_rows(tmp_path: Path, form: str, cuts, boxes) -> None:
    subject = judged(tmp_path, form, rows_of(tensor_parallel(), cuts, boxes), "tp2")
    assert subject.findings == []
    assert max(subject.errors.values()) < 1e-12


def quarters(name: str) -> list[list[Step]]:
    """Four ranks that each hold a quarter of one matrix, cut in both dimensions."""
    ranks = [right(steps=1, data_ranks=1)[0] for _ in range(4)]
    for rank, (step,) in enumerate(ranks):
        one = step.held[name]
        rows, columns = one.value.shape
        box = [[rows // 2 * (rank // 2), rows // 2 * (rank // 2 + 1)], [columns // 2 * (rank % 2)] * 2]
        box[1][1] += columns // 2
        cut = tuple(slice(*span) for span in box)
        parts = {m: p[cut] for m, p in one.parts.items()}
        step.held[name] = Held(one.value[cut], one.gradient[cut], box, (rows, columns), parts)
    return ranks


@pytest.mark.parametrize("form", FORMS)
def test_parts_that_are_cut_in_two_dimensions_are_added_up(tmp_path: Path, form: str) -> None:
    assert judged(tmp_path / "right", form, quarters("up.weight"), "tp4").findings == []
    wrong = quarters("up.weight")
    one = wrong[2][0].held["up.weight"]
    wrong[2][0].held["up.weight"] = replace(one, gradient=one.gradient + 0.01)
    assert judged(tmp_path / "wrong", form, wrong, "tp4").verdict == BUG


def test_two_layouts_by_sketches_are_compared_with_each_other(tmp_path: Path) -> None:
    sharded = write(tmp_path / "tp2", rows_of(tensor_parallel(), {**EVEN, **UNEVEN}, True), "tp2", 0)
    subject = compare(sharded, write(tmp_path / "dp2", right(), "dp2", 0))
    assert (subject.verdict, set(subject.errors)) == (PASS, set(SHAPES))
    wrong = write(tmp_path / "wrong", changed(right(), "down.weight", gradient=lambda g: 1.01 * g), "dp2", 0)
    found = only(compare(sharded, wrong))
    assert found.tensors == ("down.weight",)
    assert "1.01 times what they should be" in found.sentence


@pytest.mark.parametrize("form", FORMS)
def test_an_error_in_one_shard_is_shown_on_the_rank_that_holds_it(tmp_path: Path, form: str) -> None:
    ranks = rows_of(tensor_parallel(), EVEN, False)
    one = ranks[1][0].held["up.weight"]
    ranks[1][0].held["up.weight"] = replace(one, gradient=one.gradient * 1.001)
    subject = judged(tmp_path, form, ranks, "tp2")
    assert subject.verdict == BUG
    assert subject.by_rank["up.weight"][0] < 1e-12
    assert subject.by_rank["up.weight"][1] == pytest.approx(1e-3)
    assert {name for name, error in subject.errors.items() if error > 1e-12} == {"up.weight"}


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one percent": (lambda g: 1.01 * g, "1.01 times what they should be"),
    "lost": (lambda g: 0 * g, "zero or missing"),
    "permuted rows": (lambda g: g.flip(0), "a permutation"),
    "permuted columns": (lambda g: g.roll(1, 1), "a permutation"),
    "one row": (lambda g: torch.cat([g[:2] * 1.5, g[2:]]), "right in 6 of 8 rows, wrong in rows 0-1"),
    "one element": (lambda g: g.index_put((torch.tensor(2), torch.tensor(3)), g.new_tensor(0.5)), "wrong in rows 2-2"),
}


@pytest.mark.medium
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_is_said_as_of_whole_tensors(tmp_path: Path, form: str, how: str) -> None:
    change, words = WRONG[how]
    found = only(judged(tmp_path, form, changed(right(), "up.weight", gradient=change)))
    assert found.tensors == ("up.weight",)
    assert words in found.sentence


@pytest.mark.parametrize("form", FORMS)
def test_a_permutation_of_single_elements_is_a_bug_of_no_known_pattern_and_why_is_said(
    tmp_path: Path, form: str
) -> None:
    def scrambled(gradient: Tensor) -> Tensor:
        order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
        return gradient.flatten()[order].view(8, 6)

    found = only(judged(tmp_path, form, changed(right(), "up.weight", gradient=scrambled)))
    assert "of a permutation sketches show only one of whole rows or columns" in found.sentence


@pytest.mark.parametrize("form", ["a whole reference", "both by sketches"])
def test_shards_that_are_not_summed_over_data_ranks_are_explained_by_their_parts(tmp_path: Path, form: str) -> None:
    """dp2 tp2: each data rank keeps what its own micro-batches added to its shard."""
    cuts, ranks = {name: EVEN[name] for name in ("up.weight", "down.weight")}, []
    for data in range(2):
        for shard in rows_of(tensor_parallel(), cuts, True):
            for number, step in enumerate(shard):
                for name, one in step.held.items():
                    where = tuple(slice(*span) for span in one.box) if one.box else ()
                    parts = {m: part(name, number, data, m)[where] for m in range(2)}
                    kept = sum(parts.values()) if name in cuts else one.gradient
                    step.held[name] = replace(one, parts=parts, gradient=kept)
            ranks.append(shard[:1])
    found = [f for f in judged(tmp_path, form, ranks, "dp2 tp2").findings if f.verdict == BUG]
    assert [f.axis for f in found] == ["dp"]
    assert set(found[0].tensors) == set(cuts)
    assert "not summed over dp" in found[0].sentence


def test_an_error_near_a_limit_is_left_open_by_sketches_which_estimate_it(tmp_path: Path) -> None:

    def run(name: str, factor: float, beyond: int | None) -> Recording:
        value, gradient = (torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        noise = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
        held = Held(value, gradient + factor * noise, after=value)
        return write(tmp_path / f"{name}-{beyond}", [[Step({"w": held})]], "1", beyond)

    for beyond, verdict in ((None, PASS), (0, INCONCLUSIVE)):
        found = compare(run("right", 0.0, beyond), run("wrong", 8e-5, beyond))
        assert found.verdict == verdict, found.errors
    assert compare(run("right", 0.0, 0), run("near", 1e-5, 0)).verdict == PASS
    assert compare(run("right", 0.0, 0), run("far", 4e-3, 0)).verdict == BUG


def watched(home: Path, limit: int, wrong: bool = False) -> Recording:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 64), nn.GELU(), nn.Linear(64, 80))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(home, steps=1, limit=limit):
        for seed in range(3):
            model(torch.randn(5, 80, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        if wrong:
            model[0].weight.grad[:32] *= 2
        optimizer.step()
    return Recording(home)


def test_tensors_that_do_not_fit_into_a_rank_s_file_become_sketches_and_are_compared(tmp_path: Path) -> None:
    whole = watched(tmp_path / "whole", 1 << 20)
    sketched = watched(tmp_path / "sketched", 100_000)
    kinds = [
        {name.partition("/")[0] for name in run.ranks[0].tensors(1) if ".weight" in name} for run in (whole, sketched)
    ]
    assert kinds[0] - kinds[1] == {"final", "parameter", "after"}
    assert kinds[1] - kinds[0] == {"along"}
    assert not sketched.ranks[0].of(events.Step)[0].left_out
    for one, other in ((whole, sketched), (sketched, whole), (sketched, sketched)):
        assert compare(one, other).findings == []
    for reference in (whole, sketched):
        wrong = compare(reference, watched(tmp_path / f"wrong-{reference.path.name}", 100_000, wrong=True))
        found = only(wrong)
        assert found.tensors == ("0.weight",)
        assert "right in 32 of 64 rows, wrong in rows 0-31" in found.sentence


# -- a program's own clip ------------------------------------------------------------------------------------------


def clips(kind: str, how: str, home: str, beyond: int | None) -> None:
    """Two steps over the same rows on any number of ranks. `how`: torch's clip ("whole"), its two halves, or, wrong, a
    clip by the norm of what this rank holds ("own")."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6)))
    if kind == "DDP":
        model = DistributedDataParallel(model)
    elif kind == "FSDP2":
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(home, steps=2, beyond=beyond):
        for step in range(2):
            x = rows(8, 6, seed=step, own=False)
            model(x if kind == "TP" else x.chunk(world)[rank]).square().mean().backward()
            if how == "whole":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            elif how == "halves":
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
            else:
                own = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
                nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, nn.utils.get_total_norm(own))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_gradients_are_those_before_a_program_s_own_clip(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    def run(ranks: int, how: str, beyond: int | None) -> Recording:
        home = tmp_path / f"{ranks}-{how}-{beyond}"
        if not home.exists():
            worlds(ranks).run(partial(clips, kind, how, str(home), beyond))
        return Recording(home)

    for how in ("whole", "halves"):
        for ours, theirs in ((0, 0), (None, 0), (0, None)):
            subject = compare(run(1, "whole", theirs), run(2, how, ours))
            assert (subject.verdict, len(subject.errors)) == (PASS, 4), (how, ours, theirs, subject.findings)
            assert max(subject.errors.values()) < 1e-9
    if kind != "DDP":  # there the norm of what a rank holds is the norm of all
        for beyond in (None, 0):
            found = [f for f in compare(run(1, "whole", beyond), run(2, "own", beyond)).findings if f.verdict == BUG]
            assert [f.bug for f in found] == ["clip-per-rank"], found


def reuses(home: str, moves: bool) -> None:
    """One step with a sum after its clip: of the gradient, or of a number that lies where it was before it moved."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = seeded(lambda: nn.Linear(6, 24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(home, steps=1):
        place = bytearray(24 * 6 * 8)
        model.weight.grad = torch.frombuffer(place, dtype=torch.float64).view(24, 6)
        model(rows(8, 6, own=False)).square().mean().backward()
        assert any(place)  # the backward added to it
        if moves:
            model.weight.grad = model.weight.grad.clone()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        dist.all_reduce(torch.frombuffer(place, dtype=torch.float64, count=1) if moves else model.weight.grad)
        optimizer.step()


@pytest.mark.parametrize("moves", [True, False])
def test_memory_that_once_was_a_gradient_s_is_not_taken_for_one(worlds: Worlds, tmp_path: Path, moves: bool) -> None:
    """What the allocator did made right programs under FSDP2 a BUG now and then. Of a gradient that is summed after its
    clip, what the sum leaves is judged."""
    worlds(1).run(partial(reuses, str(tmp_path), moves))
    kept = Recording(tmp_path).ranks[0].tensors(1)["final/weight"]
    assert (float(kept.norm()) > 0.011) is moves


# -- the corpus ----------------------------------------------------------------------------------------------------

CHEAP = ("wrong-group", "norm-unreduced", "fsdp2/mean-of-means", "accum-rereduced")


def same_findings(bench: Bench, name: str) -> None:
    (what,) = every_name([name])
    whole, sketched = bench.outcome(what, 0), bench.outcome(what, 0, beyond=0)
    assert sketched.ok, [f.sentence for f in sketched.others]
    told = [{(f.verdict, f.bug, f.axis, f.tensors) for f in (o.caught, *o.others)} for o in (whole, sketched)]
    assert told[0] == told[1]
    assert sketched.alarms == ()


@pytest.mark.parametrize("name", CHEAP)
def test_a_planted_bug_is_named_from_sketches_alone(bench: Bench, name: str) -> None:
    same_findings(bench, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [what.name for what in every_name([]) if what.name not in CHEAP])
def test_every_bug_of_the_corpus_is_named_from_sketches_alone(bench: Bench, name: str) -> None:
    same_findings(bench, name)
