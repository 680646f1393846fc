"""`isograd plan CONFIG`: which layout a run should have on so many devices, before anybody pays for them.

`isograd machine` lists the machines that are known. Nothing is read but the config. See docs/plan.md for what stands
behind the numbers, and how far off they are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isograd.cli.subcommands import CommandParser, load_config, number, parse_fields
from isograd.core.layout import Layout
from isograd.errors import ConfigError, IsogradError, PlanError
from isograd.io import plots, terminal
from isograd.io.atomic import write_new

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isograd.plan.machine import Machine
    from isograd.plan.search import Candidate, SearchResult
    from isograd.plan.work import Work
    from isograd.train.config import Config

MOST_DEVICES = 1 << 20  # beyond any run
MOST_LAYERS = 4096  # of which a search cuts stages, and a rehearsal runs all
DRAWN = 200_000  # passes of a picture
CHOSEN = ("layout", "micro_batches", "accumulate", "model.recompute")  # fields of which a search tries all values


def plan(words: list[str]) -> int:
    """`isograd plan`: the best layouts, why others fell out, and what to run; the exit code."""
    parser = CommandParser(
        prog="isograd plan",
        description="Search the layouts of a config on many devices: memory and time of the best, why others fell out, "
        "and the command that runs the best one. With --layout: the time of that one, and where it goes.",
        epilog="Any field of the config can be set here, as for 'isograd train': --data.length 4096 model.dtype=bf16",
    )  # fmt: skip
    parser.add_argument("config", help="a config of 'isograd train'")
    parser.add_argument(
        "--gpus", type=number(1, MOST_DEVICES), metavar="N", help="devices (default: as many as the layout has)"
    )
    parser.add_argument("--machine", default="h100", help="one of 'isograd machine', or a YAML file (default h100)")
    parser.add_argument("--layout", help="predict this one alone")
    parser.add_argument("--batch", type=number(1, 1 << 40), metavar="N", help="sequences of a step, not the config's")
    parser.add_argument("--top", type=number(1, 1000), default=10, metavar="N", help="layouts to show (default 10)")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the step of the layout to run, stage by stage (.svg, .png or .pdf)"
    )
    parser.add_argument("--write", metavar="FILE", help="write the config with the layout to run to a new file")
    group = parser.add_argument_group("checkpoints of a long run")
    group.add_argument(
        "--failures-per-rank-hour", type=float, metavar="X",
        help="how often a device ends a run: 2e-5 for 419 stops of 16,384 devices in 54 days",
    )  # fmt: skip
    group.add_argument("--save-seconds", type=float, default=30.0, metavar="S", help="of one checkpoint (default 30)")
    group.add_argument("--restart-seconds", type=float, default=600.0, metavar="S", help="of a restart (default 600)")
    options, dotted = parse_fields(parser, words)
    if sys.stderr.isatty():  # before torch is imported, which takes seconds
        print(f"planning {options.config} ...", file=sys.stderr, flush=True)
    from isograd.plan import machine as machines
    from isograd.plan.costs import left_out

    config, work, count = _read(options, dotted, parser)
    device = machines.load(options.machine).shared(count)
    began = time.monotonic()
    found = _one(work, options.layout, device) if options.layout else _search(work, count, device)
    shown, (chosen, which) = found.best[: options.top], recommended(found.best, device)
    wide = terminal.width(140)
    print(heading(work, count, device))
    print(table(shown))
    print("90 of 100: the interval that should hold the step of 90 of 100 runs")
    rate = chosen.work.batch * chosen.work.length / chosen.step.seconds / count
    print(f"{chosen.layout}: {rate:,.0f} tokens a second per device")
    if crowded := tight(shown, device):
        print(terminal.fold(crowded, wide))
    if missing := left_out(work):
        print(terminal.fold(f"at the least: nothing is counted for {', '.join(missing)}", wide))
    if not options.layout:
        print()
        print(terminal.fold(why(found), wide))
        print(f"searched in {time.monotonic() - began:.1f} s")
    fits = found.fitting > 0
    run = f"to run {'it' if options.layout else which}:\n  {command(options.config, chosen, dotted)}"
    print("\n" + (run if fits else terminal.fold(does_not_fit(chosen, device), wide)))
    if options.picture:
        _draw(options.picture, chosen, device)
    if options.write and fits:
        _write(options.write, config, chosen)
    if options.failures_per_rank_hour is not None:
        print("\n" + terminal.fold(long_run(options, count, chosen), wide))
    return 0 if fits else 1


def machine(words: list[str]) -> int:
    """`isograd machine`: list machines, show one, or measure this computer; the exit code."""
    parser = CommandParser(
        prog="isograd machine",
        description="The machines that 'isograd plan' knows. 'show NAME' prints one, 'measure FILE' writes a "
        "description of this computer's CPU.",
    )  # fmt: skip
    parser.add_argument("verb", nargs="?", choices=("list", "show", "measure"), default="list")
    parser.add_argument("name", nargs="?", help="of a machine, or the file to write")
    options = parser.parse_args(words)
    if options.verb != "list" and not options.name:
        raise ConfigError("IG600", f"'isograd machine {options.verb}' needs a name", fix="see 'isograd machine --help'")
    from isograd.plan import machine as machines

    if options.verb == "list":
        for name in machines.names():
            print(f"{name:<8} {machines.load(name).about}")
        return 0
    if options.verb == "show":
        print(machines.text(machines.load(options.name)), end="")
        return 0
    from isograd.plan.measure import measure

    _refuse_file(options.name, "measure")
    made = machines.text(measure())
    write_new(Path(options.name), made, "give a new name")
    print(made, end="")
    return 0


def _read(options: argparse.Namespace, dotted: list[str], parser: CommandParser) -> tuple[Config, Work, int]:
    from isograd.train.reading import fetched
    from isograd.train.resources import work_of
    from isograd.train.run.emit import words_of_fields

    if options.layout is None and (named := [name for name in words_of_fields(dotted) if name in CHOSEN]):
        raise ConfigError(
            "IG600", f"a search chooses {' and '.join(named)}", seen=" ".join(dotted),
            fix="leave them out; with --layout, one layout is predicted with them",
        )  # fmt: skip
    if options.layout is not None:  # the file's own is not run, nor its batch
        dotted = [*dotted, f"--layout={options.layout}", *([f"--batch={options.batch}"] if options.batch else [])]
    config = fetched(load_config(options.config, dotted, parser).config, weights=False)
    if config.data is None:
        raise PlanError("IG275", "pairs cannot be planned", seen="`pairs` in the config", expected="`data`")
    layout = Layout.parse(config.layout)
    count = options.gpus if options.gpus is not None else layout.world_size
    if options.layout and options.gpus not in (None, layout.world_size):
        raise PlanError(
            "IG275", f"layout {str(layout)!r} needs {layout.world_size} devices", seen=f"--gpus {options.gpus}",
            expected=f"--gpus {layout.world_size}, or no --gpus",
        )  # fmt: skip
    if count > MOST_DEVICES:
        raise ConfigError("IG600", f"--gpus {count} is out of range", expected=f"1 to {MOST_DEVICES:,}")
    for name, file in (("--picture", options.picture), ("--write", options.write)):
        if file is not None:
            _refuse_file(file, name, ", ".join(plots.FORMATS) if name == "--picture" else "")
    work = work_of(config)
    if work.model.layers > MOST_LAYERS:
        raise PlanError(
            "IG275", "the model has too many layers to plan", seen=f"{work.model.layers:,} layers",
            expected=f"at most {MOST_LAYERS:,}",
        )  # fmt: skip
    return config, dataclasses.replace(work, batch=options.batch or work.batch), count


def _search(work: Work, count: int, device: Machine) -> SearchResult:
    from isograd.plan.search import SIMULATED, search

    return search(work, count, device, shown=SIMULATED, buildable=lambda layout: _refusal(work, layout))


def _one(work: Work, text: str, device: Machine) -> SearchResult:
    from isograd.plan.memory import memory
    from isograd.plan.search import Candidate, SearchResult
    from isograd.plan.step_time import predict

    layout = Layout.parse(text)
    problem = _refusal(work, layout)
    if problem is not None:
        raise PlanError("IG275", "the model cannot be built under this layout", seen=problem, expected="another layout")
    needed = memory(work, layout, gpu=device.units > 0)
    one = Candidate(layout, work, needed, predict(work, layout, device))
    return SearchResult([one], 1 if needed.total <= device.room else 0, 1)


def recommended(best: list[Candidate], device: Machine) -> tuple[Candidate, str]:
    """The fastest candidate whose memory is not tight, or else the least tight; and in words, which one it is."""
    from isograd.plan.memory import TIGHT

    for place, one in enumerate(best, 1):
        if one.memory.total <= TIGHT * device.room:
            return one, "the first" if place == 1 else f"number {place}, the first whose memory is not tight"
    place = min(range(len(best)), key=lambda index: best[index].memory.total)
    return best[place], f"number {place + 1}, the least tight: the memory of all is tight"


def does_not_fit(one: Candidate, device: Machine) -> str:
    """That a candidate does not fit, and the smallest changes of it that do."""
    from isograd.plan.memory import memory

    work, layout = one.work, one.layout
    said = f"does not fit: needs {one.memory.total / 1e9:.0f} GB, and a device has {device.room / 1e9:.0f} GB for it"
    fits: list[str] = []
    for words, changed, spread in _changes(work, layout):
        needed = memory(changed, spread, gpu=device.units > 0).total
        if needed <= device.room and spread.tp <= device.devices and _refusal(changed, spread) is None:
            fits.append(f"  {needed / 1e9:>5.1f} GB with {words}")
    if not fits:
        return f"{said}\nnor with recompute, ZeRO 3 or twice to eight times the devices: isograd plan --gpus N searches"
    return "\n".join([f"{said}; it would fit", *fits[:6]])


def _changes(work: Work, layout: Layout) -> Iterator[tuple[str, Work, Layout]]:
    """Of a plan that does not fit: (in words, the work, the layout), the smallest changes first."""
    recomputed = [("", work)]
    for how, said in (("selective", "selective"), ("full", "true")) if work.recompute == "none" else ():
        recomputed.append((f"model.recompute: {said}", dataclasses.replace(work, recompute=how)))
    if work.keeps_whole and layout.zero > 0 and layout.pp == 1:
        apart = dataclasses.replace(work, accumulate="sharded")
        recomputed.insert(1, ("accumulate: sharded", apart))
    stages = sorted({layout.zero, *(zero for zero in (1, 3) if zero > layout.zero and layout.dp * layout.cp > 1)})
    wider = [layout]
    for factor in (2, 4, 8):
        for axis in ("dp", "tp", "pp"):
            more: dict[str, Any] = {axis: factor * layout.size(axis)} | ({"sp": True} if axis == "tp" else {})
            with contextlib.suppress(IsogradError):
                wider.append(dataclasses.replace(layout, **more))
    for spread in wider:
        for zero in stages:
            for words, changed in recomputed:
                rows, rest = divmod(work.batch, spread.dp)
                if rest or rows < work.micro_batches or work.micro_batches < spread.pp:
                    continue
                with contextlib.suppress(IsogradError):
                    other = dataclasses.replace(spread, zero=zero)
                    changed.split(other)
                    named = f'--layout "{other}"' if other != layout else ""
                    if named or words:
                        yield " and ".join(filter(None, (named, words))), changed, other


def _refusal(work: Work, layout: Layout) -> str | None:
    """Why the model cannot be built under a layout: what its own layers say."""
    from isograd.core.mesh import Mesh
    from isograd.models import Transformer

    try:
        Transformer(work.model.with_layers(layout.pp * layout.vpp), Mesh.unbound(layout), device="meta")
    except IsogradError as error:
        return error.what
    return None


def heading(work: Work, count: int, device: Machine) -> str:
    """What is planned, on what."""
    from isograd.plan.work import params_on_rank
    from isograd.train.journal import human

    size = params_on_rank(dataclasses.replace(work, recompute="none"), Layout(), 0).all
    tokens = f"{work.batch:,} sequences x {work.length:,} tokens a step"
    return f"{human(int(size))} parameters in {work.dtype}, {tokens}, on {count:,} x {device.name}: {device.about}\n"


def table(best: list[Candidate]) -> str:
    """A line for each layout: memory of the rank that needs most, time, and where it goes."""
    wide = max(len(str(one.layout)) for one in best) + 2
    names = [name for name in best[0].step.parts if any(one.step.parts[name] > 0.0005 for one in best)]
    sums = f" {'accumulate':>10}" * any(one.work.reductions > 1 for one in best)
    lines = [
        f"    {'layout':<{wide}}{'micro-batches':>15}{sums} {'recompute':>9} {'GB':>6} {'step s':>8}  "
        + f"{'90 of 100':<15} {'MFU':>5}"
        + "".join(f"{name:>10}" for name in names)
    ]
    for place, one in enumerate(best, 1):
        step = one.step
        between = f"{_seconds(step.low)} to {_seconds(step.high)}"
        lines.append(
            f"{place:>3} {one.layout!s:<{wide}}{one.work.micro_batches:>15}"
            + f" {one.work.accumulate:>10}" * bool(sums)
            + f" {one.work.recompute:>9} "
            f"{one.memory.total / 1e9:>6.1f} {_seconds(step.seconds):>8}  {between:<15} {step.mfu:>5.1%}"
            + "".join(f"{step.parts[name]:>10.2f}" for name in names)
        )
    return "\n".join(lines)


def tight(best: list[Candidate], device: Machine) -> str:
    """Which layouts nearly fill a device's memory; nothing where none does."""
    from isograd.plan.memory import TIGHT

    found = [str(place) for place, one in enumerate(best, 1) if TIGHT * device.room < one.memory.total <= device.room]
    if not found:
        return ""
    return (
        f"memory is tight: {', '.join(found)} would take more than {TIGHT:.0%} of the {device.room / 1e9:.0f} GB that "
        "a program has there; what an allocator cannot use between pieces may end such a run"
    )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def why(found: SearchResult) -> str:
    """Why candidates fell out, with an example of each reason."""
    rest = "; the others:" if found.out else ""
    lines = [f"{found.tried:,} candidates, of which {found.fitting:,} fit{rest}"]
    lines += [f"  {out.count:>7,}  {reason}: {out.example}" for reason, out in found.out.items()]
    return "\n".join(lines)


def command(path: str, one: Candidate, dotted: list[str]) -> str:
    """The command that trains with a candidate's choices, and with what the command line has set of the others."""
    from isograd.train.run.emit import words_of_fields

    fields = words_of_fields(dotted).items()
    kept = [word for name, given in fields if name not in ("batch", *CHOSEN) for word in given]
    recompute = {"none": "false", "full": "true"}.get(one.work.recompute, "selective")
    return (
        f'isograd train {path} --layout "{one.layout}" --batch {one.work.batch} '
        f"--micro_batches {one.work.micro_batches} --accumulate {one.work.accumulate} "
        f"--model.recompute {recompute} {shlex.join([*kept, '--emit', 'slurm'])}"
    )


def _draw(file: str, first: Candidate, device: Machine) -> None:
    from isograd.plan import picture

    passes = 2 * first.work.micro_batches * first.layout.pp * first.layout.vpp
    if passes > DRAWN:
        raise PlanError(
            "IG275", "the step has too many passes to draw", seen=f"{passes:,} passes of all stages",
            expected=f"at most {DRAWN:,}", fix="--batch with fewer sequences, and --layout",
        )  # fmt: skip
    if not picture.step(first.work, first.layout, device, Path(file)):
        raise ConfigError("IG600", "--picture needs matplotlib, which is not installed", fix="pip install matplotlib")
    print(f"{file} written")


def _write(file: str, config: Config, one: Candidate) -> None:
    import yaml

    values = config.model_dump(mode="json", exclude_unset=True)
    values |= {"layout": str(one.layout), "batch": one.work.batch, "micro_batches": one.work.micro_batches}
    values["accumulate"] = one.work.accumulate
    values["model"]["recompute"] = {"none": False, "full": True}.get(one.work.recompute, "selective")
    write_new(Path(file), yaml.safe_dump(values, sort_keys=False), "give a new name")
    print(f"{file} written")


def _refuse_file(file: str, name: str, formats: str = "") -> None:
    """Before anything is computed: a file that could not be written."""
    path = Path(file)
    if formats and path.suffix not in formats.split(", "):
        raise PlanError("IG274", f"{name}: {file!r} has no known format", expected=f"a name ending in {formats}")
    try:
        seen = "it exists" if path.exists() else "" if path.parent.is_dir() else f"no folder {path.parent}"
    except OSError as error:
        seen = str(error.strerror)
    if seen:
        raise PlanError(
            "IG274", f"{name}: {file!r} cannot be written", seen=seen, expected="a new file in a folder that exists"
        )


def long_run(options: argparse.Namespace, count: int, one: Candidate) -> str:
    """How often to save, and what share of the time makes progress."""
    from isograd.plan.goodput import goodput

    found = goodput(options.failures_per_rank_hour, count, options.save_seconds, options.restart_seconds)
    if found.share < 0.001:
        return (
            f"long run: a failure every {found.between_failures_s:.3g} s on {count:,} ranks: "
            "nothing is trained and saved between two of them"
        )
    steps = max(1, round(found.interval_s / one.step.seconds))
    return (
        f"long run: a failure every {found.between_failures_s / 3600:.3g} hours on {count:,} ranks; saving takes "
        f"{options.save_seconds:g} s, a restart {options.restart_seconds:g} s\n"
        f"  best: a checkpoint every {found.interval_s / 60:.3g} minutes (--checkpoint.every {steps}); "
        f"{found.share:.1%} of the time makes progress that is kept"
    )
