"""Tokens that rounding sends to other experts: counted, not called a bug, and replayed.

The program's router adds its products in two halves, or at once: what a layout does. Its experts are pairs whose
weights in the router are the same to rounding, so that it decides between them.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd.cli.main import main as isograd
from isograd.launcher.launch import World
from isograd.nn import ExpertOptions, routing
from isograd_verify.command import command
from isograd_verify.compare.compare import compare
from isograd_verify.record.choices import read
from isograd_verify.record.recording import VERSION, Recording, write_json
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS, Subject
from isograd_verify.watch.capture import Capture

EXPERTS, HIDDEN, ROWS = 4, 64, 96


class Router(nn.Module):
    """Scores of tokens, whose sums are made of `halves` parts."""

    def __init__(self, halves: int, gap: float) -> None:
        super().__init__()
        self.halves = halves
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5)
        with torch.no_grad():
            self.weight[1::2] = self.weight[::2] * (1 + gap * torch.randn(EXPERTS // 2, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(self.halves, 1), self.weight.chunk(self.halves, 1), strict=True)
        return torch.stack([a.contiguous() @ b.T.contiguous() for a, b in parts]).sum(0)


class Model(nn.Module):
    """One expert for each token, of which rank r of n has each n-th; recomputed in backward."""

    def __init__(self, halves: int, sort: bool, gap: float) -> None:
        super().__init__()
        self.sort = sort
        self.embed = nn.Linear(8, HIDDEN)
        self.router = Router(halves, gap)
        self.experts = nn.ParameterList([torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(EXPERTS)])
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.layer, self.embed(x), use_reentrant=False))

    def layer(self, x: Tensor) -> Tensor:
        scores = self.router(x)  # logits: a softmax would round small differences away
        if self.sort:
            options = ExpertOptions(number=EXPERTS, per_token=1, width=1, renormalise=False)
            chosen = routing.choose(scores.detach(), options)
        else:
            chosen = scores.topk(1, dim=-1).indices
        weight = torch.zeros_like(scores).scatter(1, chosen, scores.softmax(-1).gather(1, chosen))
        return x + sum(weight[:, e : e + 1] * (x @ w) for e, w in enumerate(self.experts))


def train(
    home: Path,
    halves: int = 1,
    bug: str = "",
    replay: Path | None = None,
    sort: bool = False,
    gap: float = 1e-7,
    rows: int = ROWS,
) -> None:
    """`bug`: on two ranks, which share rows, tensors with this in their names are summed and not divided. `gap`: of
    weights between experts of a pair; rounding decides less often where it is larger."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = Model(halves, sort, gap)
    x, labels = torch.randn(rows, 8), torch.randint(5, (rows,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(home, steps=1, activations=True, replay=replay):
        F.cross_entropy(model(x[rank::world]), labels[rank::world]).backward()
        for name, parameter in model.named_parameters():
            if world > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 1 if bug and bug in name else world
        optimizer.step()
    if rank == 0:
        layout = "dp2 ep2" if world > 1 else "1"
        write_json(home / "recording.json", {"version": VERSION, "layout": layout, "replay": replay is not None})


def judged(home: Path, **how: object) -> Subject:
    train(home / "one", sort=bool(how.get("sort")))
    train(home / "two", **how)  # type: ignore[arg-type]
    return compare(Recording(home / "one"), Recording(home / "two"))


@pytest.mark.parametrize("sort", [False, True], ids=["topk", "isograd's choice"])
def test_a_choice_that_rounding_decides_is_no_bug(tmp_path: Path, sort: bool) -> None:
    subject = judged(tmp_path, halves=2, sort=sort)
    (found,) = (f for f in subject.findings if f.verdict in (BUG, INCONCLUSIVE))
    assert found.verdict == INCONCLUSIVE
    flipped = int(found.sentence.split()[2])
    assert 0 < flipped < ROWS / 2
    assert f"{flipped} of {ROWS} choices fell otherwise than in the reference" in found.sentence
    assert "experts.0" in found.sentence
    assert "--replay-routing" in found.sentence
    assert subject.facts["routing"] == f"{flipped} of {ROWS} choices fell otherwise"
    assert max(subject.errors.values()) > 1e-3


@pytest.mark.parametrize("sort", [False, True], ids=["topk", "isograd's choice"])
def test_replayed_choices_leave_no_difference(tmp_path: Path, sort: bool) -> None:
    subject = judged(tmp_path, halves=2, sort=sort, replay=tmp_path / "one")
    assert subject.verdict == PASS, subject.findings
    assert "fell otherwise and were replayed" in subject.facts["routing"]
    assert 0 < max(subject.errors.values()) < 1e-5  # in fp32


def test_equal_choices_are_told_as_such(tmp_path: Path) -> None:
    subject = judged(tmp_path)
    assert subject.verdict == PASS
    assert subject.facts["routing"] == f"0 of {ROWS} choices fell otherwise"


class Autocast(nn.Module):
    """A router whose input and scores are in fp32, and whose products autocast makes in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(8, EXPERTS), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.router(x).float().softmax(-1).topk(2, dim=-1).values.sum(-1, keepdim=True)


def test_the_rounding_of_autocast_is_that_of_its_products(tmp_path: Path) -> None:
    model = Autocast()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path, steps=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(6, 8)).sum()
        loss.backward()
        optimizer.step()
    (found,) = read(Recording(tmp_path).ranks[0].tensors(1))
    assert (found.module, found.dtype, found.kind, len(found.features)) == ("", "bfloat16", (EXPERTS, 2), 6)


def test_a_choice_from_other_scores_is_no_flip_and_is_not_replayed(tmp_path: Path, monkeypatch) -> None:
    train(tmp_path / "one")
    monkeypatch.setattr(Router, "forward", lambda router, x: x @ -router.weight.T)
    train(tmp_path / "two", replay=tmp_path / "one")
    subject = compare(Recording(tmp_path / "one"), Recording(tmp_path / "two"))
    assert subject.verdict == BUG
    assert subject.facts["routing"] == f"0 of {ROWS} choices fell otherwise, {ROWS} from other scores"


def test_which_recording_is_replayed_is_asked_for() -> None:
    for words in (["run", "--replay-routing", "--", "x.py"], ["run", "--beside-one", "--replay-routing", "one", "--"]):
        with pytest.raises(Exception, match="IG623"):
            command(words, "isograd-verify", None)


def test_a_bug_beside_flips_is_named_with_replay(worlds, tmp_path: Path) -> None:
    train(tmp_path / "one")
    world: World = worlds(2)
    found = {}
    for name, bug, replay in (
        ("open", "experts", None),
        ("bug", "experts", tmp_path / "one"),
        ("right", "", tmp_path / "one"),
    ):
        world.run(partial(train, tmp_path / name, halves=2, bug=bug, replay=replay))
        found[name] = compare(Recording(tmp_path / "one"), Recording(tmp_path / name))
    assert found["open"].verdict == INCONCLUSIVE
    assert [f.bug for f in found["bug"].findings if f.verdict == BUG] == ["expert-scale"]
    assert found["right"].verdict == PASS, found["right"].findings


FEW = {"gap": 1e-5, "rows": 2048}  # less than one choice in a hundred flips


@pytest.mark.parametrize(
    ("bug", "named", "tensors"), [("experts", "expert-scale", 4), (".", "ulysses-scale", 8), ("", "", 0)]
)
def test_a_factor_that_few_flips_cannot_explain_is_named_without_replay(
    worlds, tmp_path: Path, bug: str, named: str, tensors: int
) -> None:
    train(tmp_path / "one", **FEW)
    worlds(2).run(partial(train, tmp_path / "two", halves=2, bug=bug, **FEW))
    subject = compare(Recording(tmp_path / "one"), Recording(tmp_path / "two"))
    assert not subject.facts["routing"].startswith("0 of")
    wrong = [f for f in subject.findings if f.verdict == BUG]
    assert [f.bug for f in wrong] == ([named] if named else [])
    assert [len(f.tensors) for f in wrong] == ([tensors] if named else [])
    open_ = [f for f in subject.findings if f.verdict == INCONCLUSIVE]
    assert not {t for f in open_ for t in f.tensors} & {t for f in wrong for t in f.tensors}
    if named:
        assert "times what they should be" in wrong[0].sentence
    else:
        assert subject.verdict == INCONCLUSIVE


PROGRAM = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.randn(4, 64) / 8)
        self.router.data[1::2] = self.router.data[::2] * (1 + 1e-7 * torch.randn(2, 64))
        self.experts = nn.ParameterList([torch.randn(64, 64) / 8 for _ in range(4)])

    def forward(self, x):
        parts = 1 if world == 1 else 4
        logits = sum(a @ b.T for a, b in zip(x.chunk(parts, 1), self.router.chunk(parts, 1)))
        chosen = logits.topk(1, dim=-1).indices
        weight = torch.zeros_like(logits).scatter(1, chosen, logits.softmax(-1).gather(1, chosen))
        return x + sum(weight[:, e : e + 1] * (x @ m) for e, m in enumerate(self.experts))


model = nn.Sequential(nn.Linear(8, 64), Experts(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(3, 96, 8), torch.randint(5, (3, 96))
for step in range(3):
    mine, targets = inputs[step][rank::world].clone(), labels[step][rank::world].clone()
    F.cross_entropy(model(mine), targets).backward()
    for parameter in model.parameters():
        if world > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_an_unmodified_program_passes_beside_one_device_with_the_choices_of_its_ranks(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program, file = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    options = ["--steps", "1", "--beside-one", "--replay-routing", "--json", str(file)]
    assert isograd(["verify", "run", *options, "--", *launch]) == 0
    (subject,) = json.loads(file.read_text())["subjects"]
    assert subject["verdict"] == PASS
    assert subject["facts"]["routing"].endswith("of 96 choices fell otherwise and were replayed")
    assert max(subject["errors"].values()) < 1e-5
