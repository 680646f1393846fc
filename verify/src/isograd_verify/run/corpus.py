"""Runs programs of the corpus under capture: the one-device reference, the bug, its clean twin; says what is found."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed import distributed_c10d

from isograd_verify.compare.compare import compare
from isograd_verify.corpus import FRAMEWORKS, PROGRAMS, SEVERAL
from isograd_verify.errors import VerifyError, did_you_mean
from isograd_verify.io import tempdir
from isograd_verify.record.recording import Recording, describe
from isograd_verify.run.attach import inspect
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, NOTE, Finding, Subject
from isograd_verify.watch.capture import Capture


@dataclass(frozen=True)
class Planted:
    """One bug in one program: what runs, and what must be said of it."""

    name: str  # "norm-unreduced", or "fsdp2/mean-of-means"
    bug: str
    module: Any  # or a `program` of one
    axis: str
    tensors: str

    @property
    def lacks(self) -> str:
        """The package that its program needs, if it is not installed."""
        needs: str = getattr(self.module, "NEEDS", "")
        return needs if needs and find_spec(needs) is None else ""


@dataclass(frozen=True)
class Outcome:
    """What was said of one planted bug, with one seed, and of its clean twin."""

    planted: Planted
    seed: int
    caught: Finding | None  # the finding that names the bug, with its axis and tensors
    others: tuple[Finding, ...]  # what else was said of the wrong program
    alarms: tuple[Finding, ...]  # what was said of the right one

    @property
    def ok(self) -> bool:
        """Whether the bug was named, and nothing was said of the clean twin."""
        return self.caught is not None and not self.alarms


def module(name: str) -> Any:
    """The program of the corpus with this name."""
    assert name in (*PROGRAMS, *FRAMEWORKS), name
    own = name.replace("-", "_")
    several = (vars(import_module(f"isograd_verify.corpus.{one}")).get(own) for one in SEVERAL)
    found = next((one for one in several if isinstance(one, SimpleNamespace)), None)
    return found or import_module(f"isograd_verify.corpus.{own}")


def planted(name: str) -> list[Planted]:
    """The bugs of a program: one, or those of a framework's module."""
    program = module(name)
    if name in PROGRAMS:
        return [Planted(name, name, program, program.AXIS, program.TENSORS)]
    return [Planted(f"{name}/{bug}", bug, program, axis, names) for bug, (axis, names) in program.BUGS.items()]


def every_name(names: Sequence[str]) -> list[Planted]:
    """What the command line names: ids, frameworks, 'framework/id'; all that can run here when it names none."""
    known = {p.name: p for name in (*PROGRAMS, *FRAMEWORKS) for p in planted(name)}
    if not names:
        return [p for p in known.values() if not p.lacks]
    chosen = []
    for name in names:
        found = [p for n, p in known.items() if n == name or n.startswith(name + "/")]
        found = found or [p for p in known.values() if p.bug == name]  # of a framework's module only
        if not found:
            hint = did_you_mean(name, known)
            raise VerifyError("IG740", f"no bug {name!r} in the corpus{hint}", fix="isograd-verify bugs --list")
        here = [p for p in found if not p.lacks]
        if not here:
            what = f"{name} plants bugs in {found[0].lacks}, which is not installed"
            raise VerifyError("IG741", what, fix=f"install {found[0].lacks}")
        chosen += here
    return chosen


def record(name: str, argument: bool | str, seed: int, directory: str, beyond: int | None = None) -> None:
    """One rank's run of a program, watched. `beyond`: tensors of more elements are recorded by sketches."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    before = set(distributed_c10d._world.pg_map)
    with Capture(directory, steps=2, activations=True, beyond=beyond):
        module(name).train(argument, seed)
    dist.barrier()  # no rank still reads from a group that another one closes
    made = set(distributed_c10d._world.pg_map) - before
    for group in made:  # each would keep three threads, one of which wakes a hundred times a second
        dist.destroy_process_group(group)


class Bench:
    """Worlds of ranks, started once for all programs; references and clean twins, run once per seed."""

    def __init__(self) -> None:
        self.worlds: dict[int, LocalRanks] = {}
        self.home = Path(tempfile.mkdtemp(prefix="bugs-", dir=tempdir.home()))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self.worlds.values():
            world.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def watch(self, what: Planted, size: int, bug: bool, seed: int, beyond: int | None = None) -> Recording:
        """The recording of a run of the program on `size` ranks; a second request does not run it again."""
        name = what.name.partition("/")[0]
        place = self.home / f"{what.name.replace('/', '-') if bug else name}-{size}-{int(bug)}-{seed}-{beyond}"
        if not place.exists():
            argument = (what.bug if bug else "") if "/" in what.name else bug
            self.worlds.setdefault(size, LocalRanks(size)).run(
                partial(record, name, argument, seed, str(place), beyond), timeout=120
            )
            layout = what.module.LAYOUT if size == what.module.WORLD else "1"
            describe(place, layout=layout)
        return Recording(place)

    def outcome(self, what: Planted, seed: int, beyond: int | None = None) -> Outcome:
        """Runs the reference, the bug and the clean twin, and reads what is said of each."""
        reference = self.watch(what, 1, False, seed, beyond)
        planted = self.watch(what, what.module.WORLD, True, seed, beyond)
        wrong = inspect(planted.path) if hasattr(what.module, "ALONE") else compare(reference, planted)
        right = compare(reference, self.watch(what, what.module.WORLD, False, seed, beyond))
        caught = next((f for f in wrong.findings if names_it(f, what, wrong)), None)
        others = tuple(f for f in wrong.findings if f is not caught)
        return Outcome(what, seed, caught, others, tuple(f for f in right.findings if f.verdict != NOTE))


def names_it(found: Finding, what: Planted, subject: Subject) -> bool:
    """The right id, on the right axis, and of the right tensors: all that match, and only those."""
    if found.verdict != BUG or found.bug != what.bug or not re.search(what.axis, found.axis):
        return False
    wanted = {t for t in subject.errors if re.search(what.tensors, t)}
    return set(found.tensors) == wanted if what.tensors else True


def table(chosen: Sequence[Planted], seeds: int, say: Callable[[str], None], log: Path | None = None) -> int:
    """Print bug -> caught -> sentence; 0 when every bug is named and every clean twin is silent, else 3. `log`: a line
    for each outcome; those that are in it already are not run again."""
    shown = Table(title=f"the corpus of bugs, {seeds} seed(s) each, and their clean twins", show_lines=True)
    for column in ("bug", "caught", "clean twin", "what is said"):
        shown.add_column(column, no_wrap=column == "bug")
    known = [json.loads(line) for line in log.read_text().splitlines()] if log is not None and log.exists() else []
    rows = {(name, seed): (named, silent, said) for name, seed, named, silent, said in known}
    left = [(what, seed) for what in chosen for seed in range(seeds) if (what.name, seed) not in rows]
    with Bench() as bench:
        for what, seed in left:
            o = bench.outcome(what, seed)
            said = o.caught.sentence if o.caught else "; ".join(f.sentence for f in o.others) or "nothing"
            rows[what.name, seed] = o.caught is not None, not o.alarms, said
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps([what.name, seed, *rows[what.name, seed]]) + "\n")
            say(f"{what.name}, seed {seed}: {'named' if o.caught else 'NOT NAMED'}{'' if o.ok else ', NOT OK'}")
    good = True
    for what in chosen:
        found = [rows[what.name, seed] for seed in range(seeds)]
        counts = [sum(one[i] for one in found) for i in (0, 1)]
        good &= counts == [seeds, seeds]
        colours = ["green" if count == seeds else "red" for count in counts]
        cells = [f"[{c}]{word}{n}/{seeds}[/]" for c, word, n in zip(colours, ("", "silent "), counts, strict=True)]
        shown.add_row(what.name, *cells, escape(found[0][2]))
    Console(width=None if sys.stdout.isatty() else 140).print(shown)
    return 0 if good else 3
