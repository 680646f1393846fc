"""isograd-verify run: programs as users write them, watched without an edit; and what is said when they go wrong.

What one process shows is watched inside this one. Only what needs a launcher, a signal or a rank is started.
"""

from __future__ import annotations

import copy
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from isograd_verify.command import main
from isograd_verify.record.events import Backward, Collective, Input, Step
from isograd_verify.record.recording import RankWriter, Recording
from isograd_verify.run.attach import inspect
from isograd_verify.run.hang import place, processes
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Subject
from isograd_verify.watch.capture import Capture
from isograd_verify.watch.life import UNWATCHED

PROGRAMS = ["ddp_loop", pytest.param("fsdp2_loop", marks=pytest.mark.slow), "hf_trainer"]
EXAMPLES = Path(__file__).parents[2] / "examples" / "unmodified"
VOCAB, LENGTH = 19, 7
Program = Callable[[], None]


class Model(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        """`recompute`: how the block is checkpointed, reentrant or not; None: not at all."""
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCAB, 8)
        self.block = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.block(x) if self.recompute is None else checkpoint(self.block, x, use_reentrant=self.recompute)
        return self.head(x + y).flatten(0, 1)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Uneven: micro-batch i has labels from position i on."""
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        text = torch.randint(VOCAB, (3, LENGTH + 1), generator=generator)
        yield text[:, :-1], text[:, 1:].masked_fill(torch.arange(LENGTH) < i % 3, -100)


def step(model: nn.Module, seed: int, micros: int = 2) -> None:
    """Backwards of one step, right: the sum over all labels by their number."""
    parts = list(batches(seed + micros))[seed:]
    count = sum(int((labels != -100).sum()) for _, labels in parts)
    for tokens, labels in parts:
        (F.cross_entropy(model(tokens).float(), labels.flatten(), reduction="sum") / count).backward()


def seeded(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def loop(model: nn.Module, steps: int = 3, clip: bool = False) -> None:
    optimizer = sgd(model)
    for seed in range(steps):
        step(model, seed)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def watch(home: Path, program: Program, steps: int = 2) -> Subject:
    with Capture(home, steps=steps, lenient=True):
        program()
    return inspect(home)


def verdict_and_sentences(subject: Subject) -> tuple[str, list[str]]:
    return subject.verdict, [f"{f.bug}: {f.sentence}" if f.bug else f.sentence for f in subject.findings]


# -- in one process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
def test_a_right_loop_passes_and_every_gradient_was_seen(tmp_path, clip) -> None:
    subject = watch(tmp_path, lambda: loop(seeded(), clip=clip))
    assert verdict_and_sentences(subject) == (PASS, [])
    assert subject.facts["steps"] == "2"
    assert subject.facts["gradients"] == "7 by name"


def test_micro_batches_that_divide_by_their_own_labels_are_named(tmp_path) -> None:
    def program() -> None:
        model = seeded()
        optimizer = sgd(model)
        for _ in range(2):
            for tokens, labels in batches(3):
                (F.cross_entropy(model(tokens), labels.flatten()) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict, said = verdict_and_sentences(watch(tmp_path, program))
    assert verdict == BUG
    assert said[0].startswith("mean-of-means: step 1: all gradients: a label's weight differs by 1.4x between micro-ba")
    assert "each divides by its own number of labels: 21, 18, 15" in said[0]


def test_gradients_that_are_zeroed_between_micro_batches_are_named(tmp_path) -> None:
    def program() -> None:
        model = seeded()
        optimizer = sgd(model)
        for tokens, labels in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), labels.flatten()).backward()
        optimizer.step()

    assert [f.bug for f in watch(tmp_path, program).findings if f.verdict == BUG] == ["accum-overwritten"]


def test_nothing_is_left_in_the_program_after_the_watched_steps(tmp_path) -> None:
    model, backward, clip = seeded(), torch.autograd.backward, nn.utils.clip_grad_norm_
    given = torch.optim.Optimizer.add_param_group
    optimizer = sgd(model)
    capture = Capture(tmp_path, steps=2)
    capture.start()
    assert torch._C._len_torch_dispatch_stack() == 1
    for seed in range(2):
        assert torch.autograd.backward is not backward
        step(model, seed)
        optimizer.step()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not module_hooks._global_forward_pre_hooks and not module_hooks._global_forward_hooks
    assert not optimizer_hooks._global_optimizer_pre_hooks
    assert (torch.autograd.backward, nn.utils.clip_grad_norm_) == (backward, clip)
    assert torch.optim.Optimizer.add_param_group is given
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert torch._dynamo.eval_frame._stance.stance == "default"
    for _ in range(UNWATCHED):
        assert len(optimizer_hooks._global_optimizer_post_hooks) == 1  # times some more steps
        optimizer.step()
    assert not optimizer_hooks._global_optimizer_post_hooks
    capture.stop()
    assert "a watched step took" in inspect(tmp_path).facts["overhead"]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_waits_until_the_watched_steps_are_over(tmp_path, fullgraph) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(capture.step)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    model = torch.compile(seeded(), backend=backend, fullgraph=fullgraph)
    with Capture(tmp_path, steps=2, lenient=True) as capture:
        loop(model, steps=4)
    assert compiled == [3]
    subject = inspect(tmp_path)
    assert verdict_and_sentences(subject) == (
        PASS, ["torch.compile waited: the watched steps ran as if it were not there"]
    )  # fmt: skip
    assert "embed.weight" in subject.errors


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_backward_is_no_second_forward(tmp_path, reentrant) -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = Model(recompute=reentrant)
        loop(model)

    assert verdict_and_sentences(watch(tmp_path, program)) == (PASS, [])
    rank = Recording(tmp_path).ranks[0]
    assert len(rank.of(Input)) == len(rank.of(Backward)) == 4


def test_several_optimizers_after_one_backward_are_one_step(tmp_path) -> None:
    def program() -> None:
        model = seeded()
        first, second = sgd(model.embed, model.block), torch.optim.AdamW(model.head.parameters())
        for seed in range(3):
            step(model, seed)
            for optimizer in (first, second):
                optimizer.step()
            model.zero_grad()

    assert verdict_and_sentences(watch(tmp_path, program)) == (PASS, [])
    assert len(Recording(tmp_path).ranks[0].of(Step)) == 2


def test_optimizers_that_take_turns_are_judged_each_by_its_own_parameters(tmp_path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 6), nn.Linear(6, 1)
        makes, judges = sgd(maker), sgd(judge)
        for _ in range(3):
            made = maker(torch.randn(5, 4))
            judges.zero_grad()
            (judge(made.detach()).mean() - judge(torch.randn(5, 6)).mean()).backward()
            judges.step()
            makes.zero_grad()
            judge(made).mean().backward()
            makes.step()

    assert verdict_and_sentences(watch(tmp_path, program, steps=4)) == (PASS, [])
    held = [Recording(tmp_path).ranks[0].group(n, "final") for n in (1, 2, 3, 4)]
    assert [sorted(h) for h in held] == [["Linear.bias", "Linear.weight"], ["bias", "weight"]] * 2


def test_steps_that_are_left_out_are_no_lost_micro_batches(tmp_path) -> None:
    def by_scaler() -> None:
        model = seeded()
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i, (tokens, labels) in enumerate(batches(5)):
            loss = F.cross_entropy(model(tokens), labels.flatten()) * (float("inf") if i == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def by_norm() -> None:
        model = seeded()
        optimizer = sgd(model)
        for i, (tokens, labels) in enumerate(batches(5)):
            F.cross_entropy(model(tokens), labels.flatten()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if i != 1 and norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()

    assert verdict_and_sentences(watch(tmp_path / "scaler", by_scaler)) == (PASS, [])
    assert verdict_and_sentences(watch(tmp_path / "norm", by_norm)) == (PASS, [])
    parts = Recording(tmp_path / "norm").ranks[0].group(2, "part")  # what the step left out has added is forgotten
    assert {name.partition("/")[0] for name in parts} == {"1"}


@pytest.mark.parametrize("whole", [False, True])
def test_bfloat16_passes_by_autocast_and_throughout(tmp_path, whole) -> None:
    def program() -> None:
        model = seeded().to(torch.bfloat16) if whole else seeded()
        with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
            loop(model, clip=True)

    assert verdict_and_sentences(watch(tmp_path, program)) == (PASS, [])


def test_a_model_is_copied_and_saved_while_it_is_watched(tmp_path) -> None:
    model, kept = seeded(), []

    def program() -> None:
        optimizer = sgd(model)
        step(model, 0)
        kept.append(copy.deepcopy(model))
        torch.save(model, file := io.BytesIO())
        kept.append(file.getvalue())
        optimizer.step()

    assert verdict_and_sentences(watch(tmp_path, program)) == (PASS, [])
    assert torch.equal(kept[0].head.weight, torch.load(io.BytesIO(kept[1]), weights_only=False).head.weight)


def test_a_parameter_that_has_the_id_of_one_that_is_gone_gets_its_own_name(tmp_path) -> None:
    """A model that was only tried (a sweep, a check of sizes), dropped, and the one that is trained."""
    with Capture(tmp_path, steps=1):
        tried = [nn.Linear(3, 3, bias=False) for _ in range(100)]
        for one in tried:
            one(torch.randn(2, 3))
        gone = {id(one.weight) for one in tried}
        del tried, one
        kept = [nn.Parameter(torch.randn(3)) for _ in range(1000)]
        made = next(one for one in kept if id(one) in gone)
        model = nn.Module()
        model.register_parameter("trained", made)
        model.forward = lambda x: x * model.trained
        optimizer = sgd(model)
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert id(model.trained) in gone
    (name,) = Recording(tmp_path).ranks[0].of(Step)[0].parameters
    assert name.endswith("trained")


def test_modes_of_the_program_leave_in_their_own_order(tmp_path) -> None:
    capture, model = Capture(tmp_path, steps=2, lenient=True), seeded()
    with FlopCounterMode(display=False) as early:
        capture.start()
        step(model, 0)
    assert early.get_total_flops() > 0
    optimizer = sgd(model)
    optimizer.step()
    optimizer.zero_grad()
    with FlopCounterMode(display=False):
        step(model, 1)
        optimizer.step()
        assert torch._C._len_torch_dispatch_stack() == 2  # ours cannot go from below
    assert torch._C._len_torch_dispatch_stack() == 1
    optimizer.step()
    assert torch._C._len_torch_dispatch_stack() == 0
    capture.stop()
    assert verdict_and_sentences(inspect(tmp_path)) == (PASS, [])


class Modes(Dataset):
    """Each item: how many modes are in the way of a data loader's worker, and its process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(
            [torch._C._len_torch_dispatch_stack(), len(module_hooks._global_forward_hooks), os.getpid()]
        )


def test_forked_workers_of_a_data_loader_are_not_watched(tmp_path) -> None:
    def program() -> None:
        loop(seeded(), steps=1)
        items = torch.cat(list(DataLoader(Modes(), num_workers=2, multiprocessing_context="fork")))
        assert items[:, :2].sum() == 0
        assert os.getpid() not in items[:, 2]
        assert torch._C._len_torch_dispatch_stack() == 1

    assert verdict_and_sentences(watch(tmp_path, program)) == (PASS, [])


def test_micro_batches_behind_the_last_step_are_not_judged(tmp_path) -> None:
    def program() -> None:
        model = seeded()
        loop(model, steps=1)
        step(model, 1)

    assert verdict_and_sentences(watch(tmp_path, program, steps=9)) == (PASS, [])


def test_an_error_of_the_watcher_ends_the_watching_and_not_the_program(tmp_path, monkeypatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no sketch")

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Embedding(9, 3, sparse=True)
        optimizer = sgd(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(4)).sum().backward()
            optimizer.step()
        assert torch._C._len_torch_dispatch_stack() == 0
        done.append(model.weight.grad.is_sparse)

    done: list[bool] = []
    monkeypatch.setattr("isograd_verify.watch.recorder.sketch.sketch", broken)
    verdict, said = verdict_and_sentences(watch(tmp_path, program))
    assert done == [True]
    assert verdict == INCONCLUSIVE
    assert len(said) == 1
    assert said[0].startswith("watching ended early on rank 0, not the program: ")
    assert "RuntimeError: no sketch (test_run.py:" in said[0]


def test_an_optimizer_that_steps_inside_backward_is_said_plainly(tmp_path) -> None:
    def program() -> None:
        model = seeded()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step())
        step(model, 0)

    verdict, said = verdict_and_sentences(watch(tmp_path, program))
    assert verdict == INCONCLUSIVE
    assert "an optimizer steps inside backward, parameter by parameter, which is not understood" in said[0]


def test_gradients_in_main_grad_are_said_not_to_be_understood(tmp_path) -> None:
    """A stand-in for Megatron-Core's DDP, which allocates its buffers on CUDA only: it moves gradients as that does."""

    def moved(parameter: torch.Tensor) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def program() -> None:
        model = seeded()
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(moved)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(4)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()

    verdict, said = verdict_and_sentences(watch(tmp_path, program))
    assert verdict == INCONCLUSIVE
    assert "gradients are kept in main_grad, as by Megatron-Core's DistributedDataParallel" in said[0]


def by_hand(model: nn.Module, rate: float = 0.1) -> None:
    for seed in range(3):
        step(model, seed, micros=1)
        for parameter in model.parameters():
            if rate:
                parameter.data -= rate * parameter.grad
            if seed < 2:
                parameter.grad = None


def test_a_program_that_steps_by_hand_is_judged(tmp_path) -> None:
    subject = watch(tmp_path, lambda: by_hand(seeded()))
    assert verdict_and_sentences(subject) == (PASS, [])
    assert subject.facts["gradients"] == "7 by name"


def test_a_program_that_never_steps_is_told_so(tmp_path) -> None:
    subject = watch(tmp_path, lambda: by_hand(seeded(), rate=0.0))
    assert verdict_and_sentences(subject) == (
        INCONCLUSIVE, ["no optimizer stepped: gradients were checked as the last backward left them"]
    )  # fmt: skip
    assert subject.facts["gradients"] == "7 by name"


def test_a_write_into_a_tensor_without_elements_is_no_step_of_a_parameter_without_elements(tmp_path) -> None:
    """As on a rank that has none of the rows of a parameter cut by tp: both have the address 0."""

    def program() -> None:
        model = nn.Linear(4, 3).double()
        model.register_parameter("cut", nn.Parameter(torch.zeros(0, 4, dtype=torch.float64)))
        (model(torch.ones(2, 4, dtype=torch.float64)).sum() + model.cut.sum()).backward()
        assert model.cut.grad is not None
        torch.zeros(0, 4).copy_(torch.zeros(0, 4))

    _, (said,) = verdict_and_sentences(watch(tmp_path, program))
    assert said == "no optimizer stepped: gradients were checked as the last backward left them"


@pytest.mark.medium
@pytest.mark.parametrize("parameters", [False, True])
def test_gradients_are_written_before_activations_use_up_the_limit(tmp_path, parameters) -> None:
    """The limit is what gradients and parameters before and after need, where they are kept, and one small output."""
    model = seeded()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = (3 if parameters else 0) * whole + 4 * 3 * LENGTH * 8
    with Capture(tmp_path, steps=1, activations=True, limit=limit, parameters=parameters):
        loop(model, steps=1)
    rank = Recording(tmp_path).ranks[0]
    assert len(rank.group(1, "sum")) == 7
    assert {len(rank.group(1, kind)) for kind in ("final", "parameter", "after")} == {7 * parameters}
    assert len(rank.group(1, "out")) == 1
    left = rank.of(Step)[0].left_out
    assert left == {"limit": limit, "activations": left["activations"]}
    (note,) = inspect(tmp_path).findings
    assert note.verdict == NOTE
    said = f"step 1, rank 0: {left['activations']} activations were left out of the recording, which holds "
    assert note.sentence.startswith(said)


def test_gradients_beyond_the_limit_are_told_and_judged_by_their_sketches(tmp_path) -> None:
    with Capture(tmp_path, steps=1, limit=1000):
        loop(seeded(), steps=1)
    subject = inspect(tmp_path)
    assert subject.verdict == PASS
    assert "gradients, 14 parameters were left out of the recording" in subject.findings[0].sentence


def test_a_program_that_never_calls_backward_is_told_so(tmp_path) -> None:
    subject = watch(tmp_path, lambda: seeded()(torch.zeros(2, 3, dtype=torch.long)))
    said = "the program never called backward: there are no gradients to check"
    assert verdict_and_sentences(subject) == (INCONCLUSIVE, [said])


def test_a_program_whose_step_finds_no_gradient_is_told_so(tmp_path) -> None:
    def program() -> None:
        model = seeded()
        optimizer = sgd(model)
        step(model, 0)
        optimizer.zero_grad()
        optimizer.step()

    verdict, said = verdict_and_sentences(watch(tmp_path, program))
    assert verdict != PASS
    assert "no parameter of a called module had a gradient at the optimizer's step" in said


def test_a_stack_is_read_down_to_the_program_s_own_line() -> None:
    stack = (
        'Stack (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 3 in wait\n'
        '  File "/srv/train.py", line 40 in step\n  File "/srv/train.py", line 90 in main\n'
    )
    assert place(stack) == "train.py:40 in step"
    assert place("") == ""


def test_a_program_that_broke_because_ranks_called_different_collectives_is_told_so(tmp_path) -> None:
    watch(tmp_path, lambda: loop(seeded()))
    recording = Recording(tmp_path)
    for rank, calls in enumerate([("barrier", "all_reduce"), ("barrier", "broadcast")]):
        writer = RankWriter(tmp_path, rank, 2)
        for event in recording.ranks[0].events if rank == 0 else []:
            writer.event(event)
        for number, op in enumerate(calls):
            about = {"n": number, "op": op, "group": (0, 1), "numel": 4, "dtype": "float32", "bytes": 16, "start": 0.1}
            writer.event(Collective(3, site=f"train.py:{10 + rank} in step", **about))
        writer.close()
    assert [f.bug for f in inspect(tmp_path).findings if f.verdict == BUG] == []
    said = [f.sentence for f in inspect(tmp_path, failed=True).findings if f.bug == "order"]
    assert said == [
        "before the program failed: rank 0 calls all_reduce of 4 x float32 at train.py:10 in step, "
        "rank 1 calls broadcast of 4 x float32 at train.py:11 in step (collective 2 over ranks 0, 1)"
    ]


# -- started -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    code: int
    out: str
    err: str
    report: dict[str, Any]
    seconds: float

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [f for subject in self.report["subjects"] for f in subject["findings"]]

    @property
    def said(self) -> list[str]:
        return [f["sentence"] for f in self.findings]


@pytest.fixture
def verify_run(tmp_path, capfd, monkeypatch) -> Callable[..., Run]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*command: str, options: tuple[str, ...] = ()) -> Run:
        file = tmp_path / "report.json"
        began = time.monotonic()
        code = main(["run", "--json", str(file), *options, "--", *command])
        out, err = capfd.readouterr()
        return Run(code, out, err, json.loads(file.read_text()), time.monotonic() - began)

    return run


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
CLEAN, DIRTY = {"ddp_loop": "--global-mean", "fsdp2_loop": "--global-mean"}, {"hf_trainer": "--average-per-rank"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unmodified_program_that_counts_all_labels_passes(verify_run, name) -> None:
    switch = [CLEAN[name]] if name in CLEAN else []
    done = verify_run(*TORCHRUN, str(EXAMPLES / f"{name}.py"), *switch, "--steps", "4")
    assert (done.code, done.report["verdict"], done.findings) == (0, PASS, [])
    assert done.report["subjects"][0]["world"] == 2
    assert done.report["subjects"][0]["facts"]["steps"] == "3"
    assert "a watched step took" in done.report["subjects"][0]["facts"]["overhead"]
    losses = [line for line in done.out.splitlines() if line.startswith(("step ", "{'loss'"))]
    assert len(losses) == 4  # the program's own output


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "factor"), [(1, 2), (2, 4)])
def test_the_balance_loss_of_transformers_trainer_is_named_unmodified(verify_run, accumulate, factor) -> None:
    program = str(EXAMPLES / "hf_moe_trainer.py")
    done = verify_run(*TORCHRUN, program, "--accumulate", str(accumulate), "--steps", "2", options=("--steps", "1"))
    assert (done.code, done.report["verdict"]) == (3, BUG)
    assert [f["bug"] for f in done.findings] == ["aux-times-world"]
    (said,) = done.said
    assert f"in load_balancing_loss_func counts {factor} times where the labels count once" in said


@pytest.mark.parametrize("name", PROGRAMS)
def test_mean_of_means_is_named_in_an_unmodified_program(verify_run, name) -> None:
    switch = [DIRTY[name]] if name in DIRTY else []
    done = verify_run(*TORCHRUN, str(EXAMPLES / f"{name}.py"), *switch, "--steps", "3", options=("--steps", "2"))
    assert (done.code, done.report["verdict"]) == (3, BUG)
    assert [f["bug"] for f in done.findings] == ["mean-of-means"]
    (said,) = done.said
    assert said.startswith("step 1: all gradients: a label's weight differs by")
    assert "between ranks" in said
    assert "BUG mean-of-means" in done.out


SPAWNED = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, world, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(5, 4) + rank).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        WRONG

def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

if __name__ == "__main__":
    print("begins", flush=True)
    mp.spawn(train, (2, free_port()), nprocs=2)
"""


@pytest.fixture
def spawned(tmp_path) -> Callable[[str], list[str]]:
    def write(wrong: str) -> list[str]:
        file = tmp_path / "train.py"
        file.write_text(SPAWNED.replace("WRONG", wrong))
        return [sys.executable, str(file)]

    return write


def test_the_traceback_and_the_exit_code_of_a_rank_that_raises_pass_through(verify_run, spawned) -> None:  # V3, V18
    command = spawned("if rank == 1 and step == 1: raise ValueError('rank 1 is unwell')")
    done = verify_run(*command, options=("--beside-one",))
    assert "not compared with one device: the first run is not whole" in done.said
    assert done.code == 1
    assert done.out.startswith("begins\n")
    assert "ValueError: rank 1 is unwell" in done.err
    assert 'train.py", line 17, in train' in done.err
    assert "the program itself ended with exit code 1, which is passed on" in done.err
    assert not [f for f in done.findings if f["verdict"] == BUG], done.said
    assert done.report["subjects"][0]["world"] == 2


def test_a_hang_is_told_by_collective_line_and_rank_and_nothing_runs_on(verify_run, spawned, tmp_path) -> None:
    record = tmp_path / "recording"
    command = spawned(
        "if rank == 0: dist.all_reduce(torch.ones(6, dtype=torch.float64))\n        else: time.sleep(1e6)"
    )
    done = verify_run(*command, options=("--stall", "4", "--record", str(record)))
    assert (done.code, done.report["verdict"]) == (3, BUG)
    (said,) = done.said
    assert said.startswith("hang: rank 0 waits in all_reduce of 6 x float64 at ")
    assert "train.py:17 in train (collective " in said
    assert said.endswith(" over ranks 0, 1), which rank 1 never reached; rank 1 is at train.py:18 in train")
    assert done.findings[0]["bug"] == "order"
    assert processes(record) == set()
    assert json.loads((record / "recording.json").read_text())["stalled"] is True


def test_a_hang_after_the_watched_steps_is_told_by_line_and_count(verify_run, spawned, tmp_path) -> None:
    record = tmp_path / "recording"
    wrong = "if step == 2 and rank == 0: dist.all_reduce(torch.ones(6))\n        elif step == 2: time.sleep(1e6)"
    done = verify_run(*spawned(wrong), options=("--stall", "4", "--steps", "1", "--record", str(record)))
    assert (done.code, done.report["verdict"]) == (3, BUG)
    assert done.said[0] == (
        "hang: no optimizer step for 4 s; rank 0 is at train.py:17 in train after 3 steps; "
        "rank 1 is at train.py:18 in train after 3 steps"
    )
    assert [f["verdict"] for f in done.findings] == [BUG, NOTE]
    assert done.report["subjects"][0]["facts"]["steps"] == "1"
    assert processes(record) == set()
    assert json.loads((record / "recording.json").read_text())["stalled"] is True


LONG = """
import subprocess, sys
import torch

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
subprocess.run([sys.executable, "-c", "import time; time.sleep(5)"])
print("evaluated")
"""


def test_a_program_that_waits_for_another_one_after_its_training_is_let_be(verify_run, tmp_path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    done = verify_run(sys.executable, str(tmp_path / "long.py"), options=("--stall", "2", "--steps", "1"))
    assert (done.code, done.report["verdict"], done.findings) == (0, PASS, [])
    assert done.out.startswith("evaluated\n")


def test_a_world_that_changes_its_size_is_said_plainly(verify_run, spawned) -> None:
    wrong = """if step == 0:
            dist.barrier()
            dist.destroy_process_group()
            if rank == 1: return
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port + 1}", rank=0, world_size=1)
            model = torch.nn.Linear(4, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"""
    done = verify_run(*spawned(wrong))
    assert (done.code, done.report["verdict"]) == (4, INCONCLUSIVE)
    said = "the world changed its size during the run (2, 1 ranks): only what was before was checked"
    assert done.said == [said]
    assert done.report["subjects"][0]["facts"]["steps"] == "1"


LEFT = """
import glob
import torch
import torch.distributed as dist

def running():
    return sum("runloop" in open(name).read() for name in glob.glob("/proc/self/task/*/comm"))

for step in range(3):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    before = running()
    dist.destroy_process_group()
    del model, optimizer
    print(before == running() > 0)
"""


def test_a_destroyed_group_does_not_end_while_the_gil_is_held(verify_run, tmp_path) -> None:
    (tmp_path / "left.py").write_text(LEFT)
    done = verify_run(sys.executable, str(tmp_path / "left.py"))
    assert done.out.startswith("True\nTrue\nTrue\n")


PLAIN = """
import os, signal
import marked
import torch
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return torch.full((4,), float(index + torch._C._len_torch_dispatch_stack()))

if __name__ == "__main__":
    model = torch.nn.Linear(4, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="spawn")):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == KILLED: os.kill(os.getpid(), signal.SIGKILL)
    print("sum", float(x.sum()))
"""


@pytest.fixture
def plain(tmp_path, monkeypatch) -> Callable[[int], list[str]]:
    """A program of one process beside a sitecustomize of its own, which makes a module that the program imports."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys, types\nsys.modules['marked'] = types.ModuleType('marked')\n")
    monkeypatch.setenv("PYTHONPATH", str(own))

    def write(killed: int) -> list[str]:
        file = tmp_path / "plain.py"
        file.write_text(PLAIN.replace("KILLED", str(killed)))
        return [sys.executable, str(file)]

    return write


def test_one_process_with_spawned_workers_and_its_own_sitecustomize_passes(verify_run, plain, tmp_path) -> None:
    done = verify_run(*plain(-1))
    assert (done.code, done.report["verdict"], done.findings) == (0, PASS, [])
    assert done.out.startswith("sum 36.0\n")
    assert (done.report["subjects"][0]["world"], done.report["subjects"][0]["facts"]["steps"]) == (1, "3")


def test_a_recording_of_a_program_that_was_killed_is_readable(verify_run, plain, tmp_path) -> None:
    done = verify_run(*plain(1), options=("--record", str(tmp_path / "recording"), "--sketch"))
    assert done.code == 137
    assert [f["verdict"] for f in done.findings] == [NOTE, INCONCLUSIVE]
    assert done.said == [
        "rank 0 ended without closing the recording (killed, or left through os._exit)",
        "the program failed with exit code 137: 2 of the steps to watch (3) were seen to their end",
    ]
    assert Recording(tmp_path / "recording").steps == [1, 2]
    assert "along/final/0/weight" in Recording(tmp_path / "recording").ranks[0].tensors(1)


def test_a_recording_that_was_cut_in_a_line_is_inconclusive_and_says_where(tmp_path) -> None:
    watch(tmp_path, lambda: loop(seeded()))
    events = tmp_path / "rank-0000" / "events.jsonl"
    events.write_text(events.read_text()[:-9])
    verdict, said = verdict_and_sentences(inspect(tmp_path))
    assert verdict == INCONCLUSIVE
    assert said[0].startswith(
        "IG715: a recording's list of events cannot be read to its end (events.jsonl of rank-0000"
    )


def test_a_program_that_does_not_train_is_told_so_and_the_exit_code_is_its_own(verify_run) -> None:
    done = verify_run(sys.executable, "-c", "import torch; print('hello'); raise SystemExit(7)")
    assert (done.code, done.report["verdict"]) == (7, INCONCLUSIVE)
    assert done.out.startswith("hello\n")
    assert done.said[0].startswith("nothing to check: no process of the command joined a process group or made an opti")


def test_a_command_that_does_not_exist_leaves_nothing_behind(tmp_path, capsys) -> None:
    record = tmp_path / "recording"
    assert main(["run", "--record", str(record), "--", "no-such-program", "--fast"]) == 2
    assert "IG703: cannot start 'no-such-program'" in capsys.readouterr().err
    assert not record.exists()


def test_sketches_without_a_recording_are_refused(capsys) -> None:
    assert main(["run", "--sketch", "--", "true"]) == 2
    assert "IG624: --sketch is about a recording, and none is kept" in capsys.readouterr().err


def test_a_directory_that_holds_something_is_not_overwritten(tmp_path, capsys) -> None:
    (tmp_path / "weights.pt").write_text("precious")
    assert main(["run", "--record", str(tmp_path), "--", "true"]) == 2
    assert "IG702" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]


def test_no_command_is_an_error_with_an_example(capsys) -> None:
    assert main(["run"]) == 2
    assert "IG701: no command to watch" in capsys.readouterr().err


def test_a_rank_that_is_started_again_is_checked_by_its_last_start(tmp_path) -> None:
    watch(tmp_path, lambda: loop(seeded()))
    about = tmp_path / "rank-0000" / "rank.json"
    gone = 2**22 + 1  # above every process id
    about.write_text(json.dumps(json.loads(about.read_text()) | {"pid": gone}))
    subject = watch(tmp_path, lambda: loop(seeded(), steps=1), steps=1)
    assert verdict_and_sentences(subject) == (PASS, ["rank 0 started more than once: only the last start was checked"])
    assert subject.facts["steps"] == "1"


def test_a_second_process_of_the_same_rank_is_not_mixed_into_the_first(tmp_path) -> None:
    watch(tmp_path, lambda: loop(seeded()))
    about = tmp_path / "rank-0000" / "rank.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"pid": 1}))
    subject = watch(tmp_path, lambda: loop(seeded(), steps=1), steps=1)
    said = "a second process called itself rank 0 while the first was running, and was not watched"
    assert verdict_and_sentences(subject) == (PASS, [said])
    assert subject.facts["steps"] == "2"
