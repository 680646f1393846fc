"""Each check that needs no reference fires on its bug, and on nothing else: tiny programs, planted and watched."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import (
    HIDDEN,
    VOCAB,
    Mlp,
    ShardedMlp,
    batch,
    cross_entropy,
    micro_batches,
    seeded,
    valid,
)
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks import CHECKS, check
from isograd_verify.record.events import Collective, Event
from isograd_verify.record.recording import Recording, write_json
from isograd_verify.run.corpus import every_name
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding
from isograd_verify.watch.capture import Capture

from . import field
from .recordings import Held, Step, numbers, write

CHECK = {run.__name__: run for run in CHECKS}
MICROS = 2


# -- programs: each is right, unless something is planted in it ----------------------------------------------------


def reduce_gradients(model: nn.Module, plant: str) -> None:
    for name, p in model.named_parameters():
        if p.grad is None or (plant == "norms are not summed" and name.startswith("norm")):
            continue
        if plant == "summed in bf16":
            half = p.grad.bfloat16()
            dist.all_reduce(half)
            p.grad.copy_(half)
        else:
            dist.all_reduce(p.grad)
        if plant == "norms count twice" and name.startswith("norm"):
            p.grad.mul_(2)


def exchanged(logits: Tensor, plant: str) -> Tensor:
    """What becomes of the logits: collectives without a backward, with a say in the loss and without."""
    if plant == "summed in place on the way":
        dist.all_reduce(logits)
    if not plant.startswith("gathered"):
        return logits
    pieces = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, logits)
    if plant == "gathered for a metric":
        assert float((torch.cat(pieces).softmax(-1).max(-1).values > 0.1).double().mean()) >= 0
        return logits
    if plant == "gathered with the own part put back":
        pieces[dist.get_rank()] = logits
    if plant == "gathered with the own rows put back":
        whole = torch.stack(pieces)
        whole[dist.get_rank()] = logits
        return logits + whole.mean(0)
    return logits + torch.stack(pieces).mean(0)


OWN_WEIGHTS = torch.linspace(0.2, 3, VOCAB, dtype=torch.float64)


def share(logits: Tensor, labels: Tensor, count: Tensor, plant: str) -> Tensor:
    """What a micro-batch adds to the mean over the step's labels."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if plant == "mean of means":
        return cross_entropy(logits, labels, "mean") / MICROS / world
    if plant == "a loss per rank, not by labels":
        return cross_entropy(logits, labels) / (30 + 10 * rank)
    flat, targets = logits.flatten(0, -2), labels.flatten()
    if plant == "labels are weighed by hand":
        return (nn.functional.cross_entropy(flat, targets, reduction="none") * weights_of(targets)).sum() / count
    if plant.startswith("classes have weights"):
        kind = "mean" if plant.endswith("means") else "sum"
        return nn.functional.cross_entropy(flat, targets, weight=OWN_WEIGHTS, reduction=kind) / count
    loss = cross_entropy(logits, labels) / count
    if plant == "a second loss on one rank" and rank == 0:
        loss = loss + 0.3 * nn.functional.cross_entropy(flat.flip(-1), targets, reduction="sum") / count
    if plant == "second losses in a loop":
        loss = loss + sum(w * cross_entropy(logits.roll(i, -1), labels) / count for i, w in enumerate((0.3, 0.1)))
    if plant == "a second loss, mean of means":
        loss = loss + 0.3 * nn.functional.cross_entropy(flat.flip(-1), targets) / MICROS / world
    return loss


def weights_of(targets: Tensor) -> Tensor:
    return torch.where(targets < 0, 0.0, 0.1 + (targets % 7).double())


def regression(plant: str) -> None:
    """Uneven rows on two ranks, in two uneven micro-batches; the loss is the mean over all of the step's elements."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(11, 4).double(), torch.randn(11, 3).double()
        mine = slice(0, 7) if rank == 0 else slice(7, 11)
        for a, b in zip(x[mine].tensor_split(MICROS), y[mine].tensor_split(MICROS), strict=True):
            loss = F.mse_loss(model(a), b)
            (loss / MICROS / world if plant == "mean of means" else loss * len(a) / 11).backward()
        reduce_gradients(model, plant)
        optimizer.step()
        optimizer.zero_grad()


def adaptive_clip(*tensors: Tensor) -> None:
    """Each tensor by its own norm; the others are small enough."""
    for p in tensors:
        assert p.grad is not None
        p.grad.mul_(0.7 / (1 + float(p.grad.norm()) / float(p.data.norm())))


def after_reduction(model: Mlp, plant: str, rank: int) -> None:
    assert model.norm.weight.grad is not None
    if plant == "adaptive clipping":
        adaptive_clip(model.embed.weight, model.head.weight)
    if plant == "clipped element by element":
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    if plant == "copies differ and are clipped":
        model.down.weight.grad[3 * rank :] += 0.1
    if plant == "NaN on one rank" and rank == 1:
        model.norm.weight.grad[2] = torch.nan
    if plant == "gradients are left behind":
        model.up.weight.grad = None
    if plant == "different limits":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (rank + 1))
    elif plant == "a norm per rank":
        mine = [p for i, p in enumerate(model.parameters()) if i % 2 == rank]
        nn.utils.clip_grad_norm_(mine, 1e9)
    elif plant not in ("norms are not summed", "adaptive clipping", "clipped element by element"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


class Placed(nn.Module):
    """An embedding and learned positions, of which some are dropped: on each rank others, as its data are."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed, self.drop = embed, nn.Dropout(0.5)
        self.places = nn.Parameter(torch.linspace(-1, 1, 6 * HIDDEN).double().reshape(6, HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.drop(self.places)  # type: ignore[no-any-return]


def data_parallel(plant: str) -> None:
    """Two micro-batches on each rank, gradients summed by hand, one divisor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, 3)
    if plant == "a parameter without use":
        model.spare = nn.Linear(3, 5).double()
    if plant.endswith("a learned tensor is dropped"):
        model.embed = Placed(model.embed)
    if plant == "another start on rank 1" and rank == 1:
        model.up.weight.data.mul_(1.5)
    owned = [p for n, p in model.named_parameters() if not (plant == "norms have no owner" and n.startswith("norm"))]
    optimizer = torch.optim.SGD(owned, lr=0.1)
    for step in range(3 if plant == "rank 1 skips a step" else 2):
        count = valid(batch(step)[1])
        for tokens, labels in micro_batches(0 if plant == "the same data" else rank, world, step, MICROS):
            logits = model(tokens)
            logits = exchanged(logits, plant)
            loss = share(logits, labels, count, plant)
            if plant == "only the last micro-batch":
                optimizer.zero_grad()
            loss.backward()
            if plant == "reduced after every micro-batch":
                reduce_gradients(model, plant)
        if plant == "another dtype on rank 1":
            dist.all_reduce(torch.zeros(3, dtype=torch.int32 if rank else torch.float32))
        if plant != "reduced after every micro-batch":
            reduce_gradients(model, plant)
        after_reduction(model, plant, rank)
        if not (plant == "rank 1 skips a step" and rank == 1 and step == 1):
            optimizer.step()
        model.zero_grad()
        if plant == "changed between the steps":
            model.embed.weight.data.add_(0.5)


def tensor_parallel(plant: str) -> None:
    """Two ranks hold halves of two matrices, and drop the same elements of what all hold."""
    rank = dist.get_rank()
    model = seeded(ShardedMlp, 3)
    model.embed = nn.Sequential(model.embed, nn.Dropout(0.25))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, labels = batch(step)
        if plant.startswith("a first pass"):
            torch.manual_seed(step + (50 if plant.endswith("other draws") else 0))
            with torch.no_grad():
                model(tokens)
        torch.manual_seed(step + (50 * rank if plant == "other masks" else 0))
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
        if plant == "adaptive clipping":
            adaptive_clip(model.up.weight, model.down.weight)
        if plant == "clipped element by element":
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        if plant == "a clip per rank by hand":
            mine = [p.grad for p in model.parameters() if p.grad is not None]
            torch._foreach_mul_(mine, 0.01 / float(torch.stack(torch._foreach_norm(mine)).norm()))
        if plant == "replicas count twice in the norm":
            square = sum(p.grad.square().sum() for p in model.parameters())
            dist.all_reduce(square)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        if plant == "shards change places":
            for part in (model.up.weight, model.up.bias, model.down.weight):
                both = [torch.empty_like(part.data) for _ in range(2)]
                dist.all_gather(both, part.data.contiguous())
                part.data.copy_(both[1 - rank])


class Pair(nn.Module):
    """Column-parallel over neighbours, data-parallel over the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2 * VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))  # type: ignore[no-any-return]


def two_axes(plant: str) -> None:
    """dp2 tp2: each pair of neighbours sees one half of the data, and each member has its own half of the head."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1, 3), (0, 1), (2, 3))}
    over = groups[0, 2] if rank % 2 == 0 else groups[1, 3]
    neighbours = groups[0, 1] if rank < 2 else groups[2, 3]
    model = seeded(Pair, 3)
    whole, model.head = model.head, nn.Linear(HIDDEN, VOCAB).double()
    model.head.weight.data.copy_(whole.weight.data.chunk(2)[rank % 2])
    model.head.bias.data.copy_(whole.bias.data.chunk(2)[rank % 2])
    if plant == "a bias that began at zero":
        model.head.bias.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, labels = batch(step)
        mine = slice(0, 5) if rank < 2 else slice(5, None)
        (cross_entropy(model(tokens[mine]), labels[mine]) / valid(labels)).backward()
        for group in (neighbours, over):
            dist.all_reduce(model.embed.weight.grad, group=group)
        for p in model.head.parameters():
            wide = plant == "heads summed over the world" or (plant == "a bias that began at zero" and p.dim() == 1)
            dist.all_reduce(p.grad, group=dist.group.WORLD if wide else over)
        if plant == "a group that is no axis" and rank != 2:  # a sum that is right by chance
            dist.all_reduce(model.embed.weight.grad.mul_(0 if rank else 1), group=groups[0, 1, 3])
        optimizer.step()
        optimizer.zero_grad()
    for group in groups.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def vocabulary_parallel(plant: str) -> None:
    """DTensor's head over two ranks, under torch's loss_parallel."""
    field.column_parallel(VOCAB, "log_softmax" if plant else "loss_parallel")


# -- what each check says ------------------------------------------------------------------------------------------

Program = Callable[[str], None]
EVERYTHING = r"."


@dataclass(frozen=True)
class Said:
    """A finding that must be there: its verdict, bug and axis, the tensors it names, and words of its sentence."""

    verdict: str
    bug: str
    axis: str
    tensors: str  # a pattern: all that match and no others
    words: str


Row = tuple[str, Program, str, Said]
TABLE: list[Row] = [
    ("steps_together", data_parallel, "rank 1 skips a step",
     Said(BUG, "overflow-alone", "rank 1", EVERYTHING, "rank 1 took no optimizer step after micro-batch 4")),
    ("coefficients", data_parallel, "norms are not summed",
     Said(BUG, "norm-unreduced", "dp", r"^norm", "norms (norm.bias, norm.weight): not summed over dp")),
    ("coefficients", data_parallel, "only the last micro-batch",
     Said(BUG, "accum-overwritten", "micro-batches", EVERYTHING, "only the last micro-batch counts")),
    ("coefficients", data_parallel, "reduced after every micro-batch",
     Said(BUG, "accum-rereduced", "micro-batches", EVERYTHING, "coefficients rise by 2 each")),
    ("scales", data_parallel, "norms count twice",
     Said(BUG, "gather-backward-sum", "ranks 0, 1", r"^norm", "count 2 times (the number of micro-batches or")),
    ("scales", data_parallel, "adaptive clipping",
     Said(INCONCLUSIVE, "", "", r"^(embed|head).weight", "adaptive clipping does so on purpose")),
    ("coefficients", tensor_parallel, "adaptive clipping",
     Said(INCONCLUSIVE, "", "tp", r"^(up|down).weight", "scaled differently on tp, tensor by tensor")),
    ("coefficients", tensor_parallel, "a clip per rank by hand",
     Said(BUG, "clip-per-rank", "tp", EVERYTHING, "scaled differently on tp")),
    ("coefficients", two_axes, "heads summed over the world",
     Said(BUG, "wrong-group", "tp", r"^head", "whose members hold other shards of it")),
    ("coefficients", data_parallel, "another start on rank 1",
     Said(BUG, "replicas-differ", "dp", r"^up.weight", "but the copies began with different values")),
    ("token_weights", data_parallel, "mean of means",
     Said(BUG, "mean-of-means", "ranks and micro-batches", EVERYTHING, "each divides by its own number of labels")),
    ("token_weights", data_parallel, "a second loss, mean of means",
     Said(BUG, "mean-of-means", "ranks and micro-batches", EVERYTHING, "each divides by its own number of labels")),
    ("token_weights", data_parallel, "classes have weights, a mean of means",
     Said(BUG, "mean-of-means", "ranks and micro-batches", EVERYTHING, "each divides by its own number of labels")),
    ("token_weights", data_parallel, "a loss per rank, not by labels",
     Said(INCONCLUSIVE, "mean-of-means", "ranks and micro-batches", EVERYTHING, "does not follow the numbers of")),
    ("token_weights", data_parallel, "labels are weighed by hand",
     Said(NOTE, "", "", r"^$", "weighs its labels one by one")),
    ("graph_cuts", data_parallel, "gathered without a backward",
     Said(BUG, "cut-graph", "dp", r"^$", "all_gather at verify/tests/test_checks.py")),
    ("graph_cuts", data_parallel, "gathered with the own part put back",
     Said(INCONCLUSIVE, "cut-graph", "dp", r"^$", "right if every rank computes all of the loss")),
    ("graph_cuts", data_parallel, "gathered with the own rows put back",
     Said(INCONCLUSIVE, "cut-graph", "dp", r"^$", "right if every rank computes all of the loss")),
    ("graph_cuts", data_parallel, "summed in place on the way",
     Said(INCONCLUSIVE, "cut-graph", "dp", r"^$", "right if all ranks use the result in the same way")),
    ("logit_gradients", vocabulary_parallel, "label smoothing by hand",
     Said(BUG, "log-softmax-uncorrected", "tp", EVERYTHING, "something other than cross-entropy uses log_softmax")),
    ("continuity", data_parallel, "changed between the steps",
     Said(NOTE, "", "", r"^embed", "embed.weight changed between steps 1 and 2 without the optimizer")),
    ("continuity", tensor_parallel, "shards change places",
     Said(BUG, "resume-other-rank", "tp", r"^(up|down)", "now holds what rank")),
    ("replicas", data_parallel, "norms are not summed",
     Said(BUG, "replicas-differ", "dp", r"^norm", "copies of norm.bias, norm.weight differ between dp")),
    ("missing", data_parallel, "NaN on one rank",
     Said(BUG, "non-finite", "rank 1", r"^norm.weight", "the gradients of norm.weight are not finite on rank 1")),
    ("missing", data_parallel, "norms have no owner",
     Said(BUG, "unowned", "", r"^norm", "norm.weight, norm.bias get gradients but no optimizer owns them")),
    ("missing", data_parallel, "gradients are left behind",
     Said(BUG, "nosync-missing", "dp", r"^up.weight", "backward made them, but none has reached .grad")),
    ("missing", data_parallel, "a parameter without use",
     Said(NOTE, "", "", r"^spare", "spare.weight, spare.bias got no gradient on any rank")),
    ("norms", data_parallel, "a norm per rank",
     Said(BUG, "clip-per-rank", "dp", EVERYTHING, "the gradient norm differs between ranks")),
    ("norms", data_parallel, "different limits",
     Said(BUG, "clip-per-rank", "dp", EVERYTHING, "ranks clip by different factors")),
    ("norms", tensor_parallel, "replicas count twice in the norm",
     Said(BUG, "norm-counts-replicas", "tp", r"^(?!up|down)", "it counts every copy of replicated tensors")),
    ("norms", data_parallel, "copies differ and are clipped",
     Said(BUG, "replicas-differ", "dp", r"^down.weight", "copies of the gradients of down.weight differ")),
    ("dtypes", data_parallel, "summed in bf16",
     Said(BUG, "bf16-reduction", "dp", EVERYTHING, "reductions of fp32 gradients ran in bfloat16: all_reduce at")),
    ("order", data_parallel, "another dtype on rank 1",
     Said(BUG, "order", "ranks 0, 1", r"^$", "rank 0 calls all_reduce of 3 x float32 at")),
    ("groups", two_axes, "a group that is no axis",
     Said(NOTE, "wrong-group", "ranks 0, 1, 3", r"^embed", "runs over ranks 0, 1, 3, which is no axis of a mesh")),
    ("mean_weights", regression, "mean of means",
     Said(BUG, "mean-of-means", "ranks and micro-batches", EVERYTHING, "by its own number of elements: 12, 9, 6, 6)")),
    ("mixed_groups", two_axes, "a bias that began at zero",
     Said(INCONCLUSIVE, "wrong-group", "tp", r"^head.bias", "is summed over ranks 0-3, the weights of its module")),
    ("own_data", data_parallel, "the same data",
     Said(BUG, "same-data", "dp", r"^$", "ranks 0, 1 were given the same data in all 4 watched micro-batches")),
    ("random_draws", tensor_parallel, "other masks",
     Said(BUG, "norm-dropout-rng", "tp", r"^embed.1$", "copies of one activation on ranks 0, 1 were given different")),
    ("replayed_draws", tensor_parallel, "a first pass with other draws",
     Said(BUG, "cache-rng", "", r"^embed.1$", "without a graph and then with one, and drew other random numbers")),
]  # fmt: skip
RANKS = {
    data_parallel: (2, "dp2"), regression: (2, "dp2"), tensor_parallel: (2, "tp2"), vocabulary_parallel: (2, "tp2"),
    two_axes: (4, "dp2 tp2"),
}  # fmt: skip


def watched(program: Program, plant: str, directory: str) -> None:
    with Capture(directory, steps=3):
        program(plant)


WatchMode = Callable[[Program, str], Recording]


@pytest.fixture(scope="module")
def watch(worlds: Callable[[int], LocalRanks], tmp_path_factory: pytest.TempPathFactory) -> WatchMode:
    """Each program is run once with each plant."""
    done: dict[tuple[Program, str], Recording] = {}
    home = tmp_path_factory.mktemp("recordings")

    def run(program: Program, plant: str) -> Recording:
        if (program, plant) not in done:
            ranks, layout = RANKS[program]
            place = home / str(len(done))
            worlds(ranks).run(partial(watched, program, plant, str(place)))
            write_json(place / "recording.json", {"version": 1, "layout": layout})
            done[program, plant] = Recording(place)
        return done[program, plant]

    return run


def found_by(name: str, recording: Recording) -> list[Finding]:
    return [f for step in recording.steps for f in CHECK[name](Analysis(recording, step))]


def tensors_of(recording: Recording) -> list[str]:
    return list(Analysis(recording, 1).names)


@pytest.mark.parametrize(("name", "program", "plant", "said"), TABLE, ids=[f"{row[0]}: {row[2]}" for row in TABLE])
def test_a_check_fires_on(watch: WatchMode, name: str, program: Program, plant: str, said: Said) -> None:
    recording = watch(program, plant)
    found = found_by(name, recording)
    assert found, f"{name} is silent"
    first = found[0]
    assert (first.verdict, first.bug, first.axis) == (said.verdict, said.bug, said.axis), first.sentence
    assert said.words in first.sentence
    known = {*tensors_of(recording), *first.tensors}
    assert set(first.tensors) == {n for n in known if re.search(said.tensors, n)}
    if first.bug and first.verdict == BUG:
        assert first.cause
        assert first.look


@pytest.mark.medium
@pytest.mark.parametrize("program", RANKS)
@pytest.mark.parametrize("name", CHECK)
def test_a_check_is_silent_on_the_right(watch: WatchMode, name: str, program: Program) -> None:
    assert found_by(name, watch(program, "")) == []


ON_PURPOSE = (
    "gathered for a metric", "labels are weighed by hand", "classes have weights", "a second loss on one rank",
    "second losses in a loop", "clipped element by element", "a learned tensor is dropped",
)  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("plant", ON_PURPOSE)
def test_what_is_right_on_purpose_is_not_told(watch: WatchMode, plant: str) -> None:
    assert [f for f in check(watch(data_parallel, plant)) if f.verdict != NOTE] == []


def test_a_first_pass_with_the_same_draws_is_not_told(watch: WatchMode) -> None:
    assert check(watch(tensor_parallel, "a first pass with the same draws")) == []


def test_shards_that_are_clipped_element_by_element_are_not_clipped_per_rank(watch: WatchMode) -> None:
    assert check(watch(tensor_parallel, "clipped element by element")) == []


@pytest.mark.parametrize("layout", ["dp2", ""])
@pytest.mark.parametrize("plant", ["a learned tensor is dropped", "the same data and a learned tensor is dropped"])
def test_data_ranks_drop_what_they_like_whatever_is_known(
    watch: WatchMode, tmp_path: Path, plant: str, layout: str
) -> None:
    recording = watch(data_parallel, plant)
    shutil.copytree(recording.path, tmp_path / "copy")
    write_json(tmp_path / "copy" / "recording.json", {"version": 1, "layout": layout})
    assert found_by("random_draws", Recording(tmp_path / "copy")) == []


def test_copies_of_an_activation_need_no_layout_to_be_known(watch: WatchMode, tmp_path: Path) -> None:
    recording = watch(tensor_parallel, "other masks")
    shutil.copytree(recording.path, tmp_path / "copy")
    write_json(tmp_path / "copy" / "recording.json", {"version": 1, "layout": ""})
    assert [f.bug for f in found_by("random_draws", Recording(tmp_path / "copy"))] == ["norm-dropout-rng"]


# Checks whose planted program is in the corpus (test_bugs.py runs it) or in field.py (test_field.py): the bug it names.
ELSEWHERE = {
    "choice_bias": "bias-per-micro",
    "counted_once": "bias-twice",
    "same_choice": "recompute-flip",
    "balance_counts": "aux-times-world",
    "alive": "dead-model",
    "copies": "copies-begin-apart",
    "rates": "rates-differ",
    "averages": "averages-differ",
    "computed_again": "temperature-scale",  # in public.py, as the next one
    "undivided": "accum-undivided",  # in trackers.py
    "row_sums": "bf16-accumulation",
}


def test_every_check_is_planted() -> None:
    assert set(ELSEWHERE.values()) <= {what.bug for what in every_name([])}
    notes = {"shared_draws", "counted", "rewritten", "summed_inside", "adjoints"}  # in trackers.py
    later = {"carried", "coefficients_unjudged", "scaled_clips", "whole_terms", "scaled_apart"}  # in later.py, ...
    assert {name for name, _, _, _ in TABLE} | {*ELSEWHERE, *notes, *later} == set(CHECK)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "plant", "bug"),
    [(p, plant, said.bug) for name, p, plant, said in TABLE if said.verdict == BUG and name != "replicas"],
)
def test_all_checks_together_name_that_bug_alone(watch: WatchMode, program: Program, plant: str, bug: str) -> None:
    assert {f.bug for f in check(watch(program, plant)) if f.verdict == BUG} == {bug}


# -- written by hand -----------------------------------------------------------------------------------------------


def by_hand(home: Path, *of_ranks: dict[str, Held], events: list[list[Event]] | None = None) -> Recording:
    """One step; each rank's parameters, and its events."""
    told = events or [[] for _ in of_ranks]
    ranks = [[Step(dict(held), events=mine)] for held, mine in zip(of_ranks, told, strict=True)]
    return write(home, ranks, f"dp{len(ranks)}")


def call(op: str = "all_reduce", numel: int = 5, group: tuple[int, ...] = (0, 1), dtype: str = "float32") -> Collective:
    place = {"phase": "backward", "site": "train.py:9 in step"}
    return Collective(n=0, op=op, group=group, dtype=dtype, numel=numel, **place)


A, B = call(numel=5), call("all_gather", 7)
ORDERS: dict[str, tuple[list[Event], list[Event], str]] = {
    "alike": ([A, B, A], [A, B, A], ""),
    "none": ([], [], ""),
    "swapped": ([A, B], [B, A], "collective 1 over ranks 0, 1: rank 0 calls all_reduce of 5 x float32 at train.py:9"),
    "one more on rank 0": (
        [A, B],
        [A],
        "rank 0 calls all_gather of 7 x float32 at train.py:9 in step, rank 1 calls none",
    ),
    "none on rank 0": ([], [A], "collective 1 over ranks 0, 1: rank 0 calls none"),
    "another size": ([A], [call(numel=6)], "rank 1 calls all_reduce of 6 x float32"),
    "another dtype": ([A], [call(dtype="bfloat16")], "rank 1 calls all_reduce of 5 x bfloat16"),
    "uneven gathers": ([B], [call("all_gather", 8)], ""),
    "point to point": ([call("send")], [call("recv")], ""),
    "alone in its group": ([call(group=(0,)), A], [A], ""),
}


@pytest.mark.parametrize("name", ORDERS)
def test_members_of_a_group_must_call_alike(tmp_path: Path, name: str) -> None:
    first, second, words = ORDERS[name]
    found = found_by("order", by_hand(tmp_path, {}, {}, events=[first, second]))
    assert [(f.bug, f.axis) for f in found] == ([("order", "ranks 0, 1")] if words else [])
    assert all(words in f.sentence for f in found)


def shared(name: str, micros: int, size: int, gradient: Callable[[list[Tensor]], Tensor]) -> list[dict[str, Held]]:
    """Two ranks' copies of a parameter; the gradient is made of what all micro-batches added."""
    parts = [[numbers(size, seed=10 * k + m) for m in range(micros)] for k in range(2)]
    whole = gradient([p for mine in parts for p in mine])
    return [{name: Held(numbers(size), whole, parts=dict(enumerate(mine)))} for mine in parts]


def test_a_temperature_is_too_small_to_tell_its_contributions_apart(tmp_path: Path) -> None:
    right = by_hand(tmp_path / "right", *shared("temperature", 2, 1, lambda parts: torch.stack(parts).sum(0)))
    wrong = by_hand(tmp_path / "wrong", *shared("temperature", 2, 1, lambda parts: parts[0] + 2 * parts[3]))
    assert [f for f in found_by("coefficients", right) if f.verdict != NOTE] == []
    found = found_by("coefficients", wrong)
    # One number is always some multiple of another: nothing is guessed.
    assert all(f.verdict == INCONCLUSIVE for f in found)


def test_three_numbers_cannot_tell_four_contributions_apart_and_it_is_said(tmp_path: Path) -> None:
    wrong = by_hand(tmp_path, *shared("scale", 2, 3, lambda parts: parts[0] + 2 * parts[3]))
    (found,) = found_by("coefficients", wrong)
    assert (found.verdict, found.tensors) == (INCONCLUSIVE, ("scale",))
    assert "scale is too small to tell its contributions apart, and they do not all count equally" in found.sentence


def test_what_is_no_sum_of_contributions_is_said_to_be_none(tmp_path: Path) -> None:
    odd = by_hand(tmp_path, *shared("w", 1, 400, lambda parts: parts[0] + parts[1] + numbers(400, seed=99)))
    (found,) = found_by("coefficients", odd)
    assert (found.verdict, found.tensors) == (INCONCLUSIVE, ("w",))
    assert "what reached the optimizer is no sum of what backward added" in found.sentence


def test_a_rank_whose_part_of_a_gradient_is_zero_has_no_factor(tmp_path: Path) -> None:
    boxes = [[[0, 4], [0, 3]], [[4, 8], [0, 3]]]
    held = [
        {
            "w": Held(
                numbers(4, 3, seed=k), numbers(4, 3) * (1 - k), box=boxes[k], whole=(8, 3), parts={0: numbers(4, 3)}
            )
        }
        for k in range(2)
    ]
    assert found_by("norms", by_hand(tmp_path, *held)) == []


def test_biases_that_begin_at_zero_beside_sharded_weights_may_be_shards_in_every_step(tmp_path: Path) -> None:
    ranks: list[list[Step]] = [[], []]
    bias = [torch.zeros(4).double(), torch.zeros(4).double()]
    weight = [numbers(4, 3, seed=k) for k in range(2)]
    for step in range(2):
        for k in range(2):
            g, h = numbers(4, seed=20 + k + step), numbers(4, 3, seed=30 + k + step)
            held = {"up.weight": Held(weight[k], h, parts={0: h}), "up.bias": Held(bias[k], g, parts={0: g})}
            ranks[k].append(Step(held))
            bias[k], weight[k] = bias[k] - 0.1 * g, weight[k] - 0.1 * h
    recording = write(tmp_path, ranks, "tp2")
    found = found_by("replicas", recording)
    assert [(f.verdict, f.tensors) for f in found] == [(INCONCLUSIVE, ("up.bias",))] * 2
    assert "compare with a recording of one device" in found[0].sentence
    assert found_by("coefficients", recording) == []


def test_later_steps_are_not_searched_once_a_bug_is_found(watch: WatchMode) -> None:
    found = check(watch(data_parallel, "only the last micro-batch"))
    assert [f.sentence.partition(":")[0] for f in found if f.verdict == BUG] == ["step 1"]


def test_copies_that_drift_because_of_a_named_bug_are_not_told_again(watch: WatchMode) -> None:
    recording = watch(data_parallel, "norms are not summed")
    assert found_by("replicas", recording) != []
    assert [f.bug for f in check(recording)] == ["norm-unreduced"]
