"""verify(case, layouts): one device, then each layout in a world of local ranks, compared in fp64.

The reference is plain torch: autograd on (sum of losses over all tokens) / (number of all tokens), torch's own clip
and optimizer; nothing of the engine is in it. It runs twice, because a program that is not equal to itself cannot be
compared. Reference and layouts run under capture, so what is compared and diagnosed is what a recording holds.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isograd.core.layout import Layout
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.core.step_counters import StepCounters
from isograd.errors import LaunchError, VerifyError
from isograd.io import tempdir
from isograd.launcher.launch import World
from isograd.pipeline import picture
from isograd.pipeline.schedule import Action, Timed, build
from isograd.prove.case import Case
from isograd_verify import tolerances
from isograd_verify.compare.classes import fit_all, fitted, kind_findings, large_kinds, mean_of, shifts
from isograd_verify.compare.compare import compare, match_names, places_of
from isograd_verify.compare.numerics import Associated, Noise
from isograd_verify.compare.values import whole_values
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import LabelWeight, Norm, PipelineActions, Result
from isograd_verify.record.recording import VERSION, Recording, write_json
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, Subject
from isograd_verify.tell.report import Report
from isograd_verify.watch.capture import Capture

if TYPE_CHECKING:
    from isograd.engine import Engine

MakeCase = Callable[[Mesh], Case]
# Members of the ensemble: parts that the batch is cut into, and terms into which every matrix product's sum is split.
MORE_TERMS = (2, 3, 4, 5, 6)  # of more runs of a layout, over which factors of kinds of parameters are averaged
ASSOCIATIONS = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2), (3, 4), (5, 3), (8, 2), (8, 4))


def verify(
    case: MakeCase | str,
    layouts: Sequence[str] | str,
    *,
    dtype: torch.dtype = torch.float64,
    timeout: float | None = 600.0,
    progress: Callable[[str], None] = lambda _: None,
    keep: str | Path | None = None,
    replay_routing: bool = False,
) -> Report:
    """Prove every layout of a case. `case`: a function of a mesh, or 'FILE.py:NAME'. `keep`: leave recordings here.
    `replay_routing`: where the scores of experts are the same to rounding, layouts choose as one device did.

    dtype float64 is the proof; a narrower one judges by the noise of re-associated one-device runs (numerics.py).
    """
    chosen = [Layout.parse(text) for text in (layouts.split(";") if isinstance(layouts, str) else layouts)]
    home = Path(keep) if keep is not None else Path(tempfile.mkdtemp(prefix="verify-", dir=tempdir.home()))
    many = f"{len(chosen)} layouts" if len(chosen) > 1 else str(chosen[0])
    report = Report(f"gradients of {name_of(case)} under {many} against one device, {str(dtype)[6:]}")
    worlds: dict[int, World] = {}
    try:
        pieces = {str(layout): layout.dp for layout in chosen}
        references: dict[int, Recording] = {}
        worlds[1] = World(1)
        for data_ranks in sorted(set(pieces.values())):
            progress(f"one device, batch in the pieces of {data_ranks} data rank(s)")
            first, second = (_reference(worlds[1], case, data_ranks, dtype, home, i, timeout) for i in (0, 1))
            changed = nondeterministic(first, second)
            if changed is not None:
                report.subjects.append(Subject("one device, run twice", 1, findings=[changed]))
                return report
            references[data_ranks] = first
        noise = None
        if dtype != torch.float64:
            progress("the same, re-associated, for the noise")
            taken = next(iter(references.values())).path if replay_routing else None
            noise = ensemble(worlds[1], case, dtype, home, timeout, taken)
        for layout in chosen:
            progress(str(layout))
            size = layout.world_size
            world = worlds.setdefault(size, World(size))
            place = home / str(layout).replace(" ", "_")
            reference = references[pieces[str(layout)]]
            norms = {event.step: event.value for event in reference.ranks[0].of(Norm)}
            taken = reference.path if replay_routing else None
            world.run(partial(_on_layout, case, str(layout), dtype, str(place), norms, taken), timeout=timeout)
            write_json(
                place / "recording.json", {"version": VERSION, "layout": str(layout), "replay": bool(replay_routing)}
            )
            recording = Recording(place)
            subject = compare(reference, recording, noise=noise)
            wide = torch.finfo(dtype).eps >= tolerances.KIND_EPS  # tensors of a kind show what drowns in each
            if wide and noise is not None and subject.verdict != BUG and large_kinds(noise.mean):
                progress(f"{layout}, re-associated, for kinds of parameters")
                again = [recording]
                for terms in MORE_TERMS:
                    other = home / f"{place.name}-{terms}"
                    task = partial(_on_layout, case, str(layout), dtype, str(other), norms, taken, terms)
                    world.run(task, timeout=timeout)
                    again.append(Recording(other))
                explain(subject, kinds(reference, again, noise))
            _note_even(recording, layout, subject)
            subject.schedule = _pictured(recording, layout)
            report.subjects.append(subject)
    finally:
        for world in worlds.values():
            world.close()
        if keep is None:
            shutil.rmtree(home, ignore_errors=True)
    return report


def assert_same_gradients(case: MakeCase | str, layouts: Sequence[str] | str, **options: object) -> Report:
    """For test suites: the report as the message when a layout's gradients are not one device's."""
    report = verify(case, layouts, **options)  # type: ignore[arg-type]
    assert report.ok, f"\n{report}"
    return report


def make(case: MakeCase | str, mesh: Mesh, dtype: torch.dtype) -> Case:
    """A case on a mesh in a dtype, from a function or from 'FILE.py:NAME'."""
    if isinstance(case, str):
        file, _, name = case.rpartition(":")
        folder = str(Path(file).resolve().parent)
        if folder not in sys.path:  # as for a script: it imports its neighbours, now and when its functions are called
            sys.path.insert(0, folder)
        names = runpy.run_path(file)
        if name not in names:
            found = [n for n, v in names.items() if callable(v) and not n.startswith("_")]
            raise VerifyError("IG732", f"{file} has no {name!r}", seen=f"functions {found}", fix="FILE.py:FUNCTION")
        case = names[name]
    made = case(mesh)  # type: ignore[operator]
    if not isinstance(made, Case):
        raise VerifyError("IG733", seen=type(made).__name__)
    return made.to(dtype)


def name_of(case: MakeCase | str) -> str:
    """What a report calls a case."""
    return case if isinstance(case, str) else getattr(getattr(case, "func", case), "__name__", "a case")


def one_device(
    case: MakeCase | str,
    data_ranks: int,
    dtype: torch.dtype,
    directory: str,
    terms: int = 1,
    exact: bool = False,
    replay: Path | None = None,
) -> None:
    """The truth, in plain torch. `terms`: into how many each product's sum is split (numerics.Associated). `exact`:
    weights rounded to `dtype`, everything else in fp64. `replay`: whose choices of experts it takes."""
    made = make(case, Mesh("1"), dtype)
    if exact:
        made = made.to(torch.float64)
    associated = Associated(terms) if terms > 1 else nullcontext()
    with Capture(directory, steps=made.steps, activations=True, replay=replay) as capture, associated:

        def gradients() -> None:
            if made.step is not None:
                made.step(made.model, made.batch, Mesh("1"))
            else:
                _sum_of_parts(made, made.parts(data_ranks * made.micro_batches), capture)

        def clip(parameters: list[Tensor]) -> None:
            if made.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, made.clip)

        _train(made, gradients, clip)


def _train(made: Case, gradients: Callable[[], None], clip: Callable[[list[Tensor]], None]) -> None:
    """A case's steps: its gradients, clipped before its optimizer uses them. What layers counted is used as by a step
    of the engine."""
    tallies = StepCounters(made.model, Mesh("1")) if made.step is None else None
    parameters: list[Tensor] = [p for p in made.model.parameters() if p.requires_grad]
    optimizer = made.optimizer(parameters)
    for _ in range(made.steps):
        gradients()
        clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        if tallies is not None:
            tallies.end(committed=True)


def _sum_of_parts(case: Case, parts: list[object], capture: Capture) -> None:
    capture.active = False
    totals = sum_weights(case.terms(part) for part in parts)  # with gradients: some terms are made only then
    capture.active = True
    sums = dict.fromkeys(totals, 0.0)  # of coefficient * value * weight
    for part in parts:
        terms = {name: term for name, term in case.terms(part).items() if float(term.weight)}
        shares = [
            t.value * torch.tensor(t.coefficient * float(t.weight) / totals[n], dtype=torch.float64).to(t.value.dtype)
            for n, t in terms.items()
            if t.coefficient
        ]
        if shares:
            reduce(add, shares).backward()
        for name, (value, weight, coefficient) in terms.items():
            sums[name] += float(value.detach().double()) * float(weight) * coefficient
    there = {name: total for name, total in totals.items() if total}
    loss = sum(sums[name] / total for name, total in there.items())
    capture.event(Result(*capture.now, loss=loss, weight=next(iter(there.values()))))


def sum_weights(results: Iterable[Terms]) -> dict[str, float]:
    """{name: weight} of several parts."""
    totals: dict[str, float] = {}
    for terms in results:
        for name, term in terms.items():
            totals[name] = totals.get(name, 0.0) + float(term.weight)
    return totals


def backwards(engine: Engine, case: Case, parts: Sequence[object], capture: Capture | None = None) -> None:
    """The backwards of one step through isograd's engine, outside of pipelines. The weights of a loss of several terms
    are counted before, by a pass without gradients, which `capture` does not see."""
    for number, part in enumerate(parts):
        result = case.mean(part)
        if not isinstance(result, Terms):
            engine.backward(*result)
            continue
        if not number:
            if capture is not None:
                capture.active = False
            with torch.random.fork_rng([]):
                weights = sum_weights([result, *(case.terms(other) for other in parts[1:])])
            if capture is not None:
                capture.active = True
            engine.begin(**weights)
        engine.backward(result)


def _on_layout(
    case: MakeCase | str,
    layout: str,
    dtype: torch.dtype,
    directory: str,
    norms: dict[int, float],
    replay: Path | None = None,
    terms: int = 1,
) -> None:
    """The layout, through isograd's engine or the case's own step. `norms`: the reference's, by step. `replay`: whose
    choices of experts it takes. `terms`: into how many each product's sum is split.

    A case's own step leaves shards and copies of which only the case knows which is which, so no norm can be taken here
    without planting a bug. Right gradients have the reference's norm: that one clips.
    """
    mesh = Mesh(layout)
    made = make(case, mesh, dtype)
    associated = Associated(terms) if terms > 1 else nullcontext()
    if made.step is not None:
        step = partial(made.step, made.model, made.batch, mesh)
        with Capture(directory, steps=made.steps, activations=True, replay=replay) as capture, associated:

            def clip(parameters: list[Tensor]) -> None:
                if made.clip is None or capture.step not in norms:
                    return
                capture.snapshot()
                factor = min(1.0, made.clip / (norms[capture.step] + 1e-6))  # as torch's clip_grad_norm_
                for p in parameters:
                    if p.grad is not None:
                        p.grad.mul_(factor)

            _train(made, step, clip)
        return
    from isograd.engine import Engine

    if mesh.size("pp") > 1 and made.loss is not None:
        raise VerifyError("IG735", seen=f"a case with loss= under {layout!r}", where=mesh.describe_rank())
    engine = Engine(made.model, mesh, made.optimizer, clip=made.clip)
    mine = pieces_of(made, mesh)
    with Capture(directory, steps=made.steps, activations=True, replay=replay) as capture, associated:
        for _ in range(made.steps):
            if engine.pipeline is None:
                backwards(engine, made, mine, capture)
            else:
                engine.accumulate(mine)
                did = tuple((*t.action, t.start, t.end) for t in engine.pipeline.timeline)
                capture.event(PipelineActions(*capture.now, actions=did))
            number = capture.step
            stats = engine.step()
            if capture.writer is not None:
                capture.writer.event(Result(number, loss=stats.loss, weight=stats.weight))


def pieces_of(case: Case, mesh: Mesh) -> list[object]:
    """This data rank's micro-batches; cp ranks share their sequences, and the model cuts them."""
    parts = case.parts(mesh.size("dp") * case.micro_batches)
    return parts[mesh.index("dp") * case.micro_batches :][: case.micro_batches]


def _reference(
    world: World,
    case: MakeCase | str,
    data_ranks: int,
    dtype: torch.dtype,
    home: Path,
    number: int,
    timeout: float | None,
) -> Recording:
    place = home / f"one-device-{data_ranks}-{number}"
    world.run(partial(one_device, case, data_ranks, dtype, str(place)), timeout=timeout)
    write_json(place / "recording.json", {"version": VERSION, "layout": "1"})
    return Recording(place)


def ensemble(
    world: World,
    case: MakeCase | str,
    dtype: torch.dtype,
    home: Path,
    timeout: float | None,
    replay: Path | None = None,
) -> Noise:
    """Run one device in every association. `replay`: all with the choices of experts of this recording."""
    runs: list[dict[str, Tensor]] = []
    most = world.run(partial(_most_pieces, case, dtype))[0]
    for pieces, terms in ASSOCIATIONS:
        place = home / f"noise-{pieces}-{terms}"
        world.run(
            partial(one_device, case, min(pieces, most), dtype, str(place), terms, replay=replay), timeout=timeout
        )
        record = Recording(place).ranks[0]
        runs.append({name: t.double() for name, t in record.group(1, "final").items()})
    truth = "fp64"
    try:
        place = home / "noise-truth"
        world.run(partial(one_device, case, 1, dtype, str(place), exact=True, replay=replay), timeout=timeout)
        mean = {name: t.double() for name, t in Recording(place).ranks[0].group(1, "final").items()}
    except LaunchError:  # a kernel that has no fp64; the case itself ran above
        truth = "mean"
        mean = {name: torch.stack([run[name] for run in runs]).mean(0) for name in runs[0]}
    variance = {
        name: torch.stack([(run[name] - centre).square() for run in runs]).mean(0) for name, centre in mean.items()
    }
    squares = sum(float(centre.square().sum()) for centre in mean.values())
    factors = [sum(float((run[name] * centre).sum()) for name, centre in mean.items()) / squares for run in runs]
    off = (sum((f - 1) ** 2 for f in factors) / len(factors)) ** 0.5
    each = tuple({name: fitted([run[name]], [centre])[0] for name, centre in mean.items()} for run in runs)
    return Noise(truth, mean, variance, max(off, tolerances.least_factor(torch.finfo(dtype).eps)), each)


def kinds(reference: Recording, runs: list[Recording], noise: Noise) -> list[Finding]:
    """Kinds of parameters that have a factor of their own, on the average over re-associated runs of a layout."""
    found, eps = [], 0.0
    start = whole_values(Analysis(reference, 1), "parameter")
    for recording in runs:
        analysis = Analysis(recording, 1)
        names = {n: t for n, t in match_names(analysis, noise.mean, start, {}).items() if t in noise.mean}
        spots = places_of(analysis, start, names)
        one, eps = fit_all(analysis, {n: noise.mean[t] for n, t in names.items()}, names, spots)
        found.append(one)
    if any(one.keys() != found[0].keys() for one in found):
        return []
    runs_of_one = tuple({n: run[names[n]] for n in found[0]} for run in noise.factors)
    return kind_findings(1, shifts(mean_of(found), eps, runs_of_one))


def explain(subject: Subject, told: list[Finding]) -> None:
    """Adds what is told of kinds of parameters; a kind that is wrong explains a factor of all gradients together."""
    wrong = {name for f in told if f.verdict == BUG for name in f.tensors}
    kept = [f for f in subject.findings if not (wrong and f.verdict == INCONCLUSIVE and wrong < set(f.tensors))]
    subject.findings = [*kept, *told]


def _most_pieces(case: MakeCase | str, dtype: torch.dtype) -> int:
    made = make(case, Mesh("1"), dtype)
    return made.rows // made.micro_batches


def nondeterministic(first: Recording, second: Recording) -> Finding | None:
    """A finding when two runs of the same program on one device differ."""
    for step in first.steps:
        one, two = (r.ranks[0].group(step, "final") for r in (first, second))
        apart = tuple(n for n in one if n not in two or not torch.equal(one[n].nan_to_num(), two[n].nan_to_num()))
        if apart:
            sentence = (
                f"the case is not deterministic: two runs on one device differ in {len(apart)} gradients "
                f"of step {step} ({apart[0]}); seed its random numbers by sample (isograd.core.rng) or switch them off"
            )
            return Finding(INCONCLUSIVE, "", sentence, tensors=apart)
    return None


def _note_even(recording: Recording, layout: Layout, subject: Subject) -> None:
    """Equal counts everywhere would hide a mean of means: say so, where there is more than one of them."""
    counts: dict[tuple[int, int, int], float] = {}
    for record in recording.ranks:
        at = layout.coordinates(record.rank)
        for e in record.of(LabelWeight, 1):
            counts[at["dp"], at["cp"], e.micro] = e.count
    if len(counts) > 1 and len(set(counts.values())) == 1:
        sentence = "every rank and micro-batch has the same number of labels: a mean of means would not show"
        subject.findings.append(Finding(NOTE, "", sentence))


def _pictured(recording: Recording, layout: Layout) -> dict[str, str]:
    """The schedule of the last step, as the first rank of each pipeline stage ran it while it was watched."""
    if layout.pp == 1:
        return {}
    ranks = [recording.ranks[rank].of(PipelineActions)[-1].actions for rank in layout.ranks("pp", 0)]
    rows = [[Timed(Action(*did[:3]), *did[3:]) for did in actions] for actions in ranks]
    count = 1 + max(timed.action.micro for row in rows for timed in row)
    schedule = build(layout.schedule, layout.pp, layout.vpp, count)
    return {"text": picture.ascii(schedule, rows, width=100), "svg": picture.svg(schedule, rows)}
