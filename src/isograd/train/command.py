"""isograd train, compare and config: the command line of runs. Torch is not imported before a run starts.

isograd train quickstart.yaml --layout "dp4 zero2" --optimizer.lr 1e-3
isograd train run.yaml --dry-run
isograd train run.yaml --emit slurm --nodes 8 > run.sbatch
isograd compare run.yaml --layouts "dp4; tp2 sp dp2; cp2 ulysses dp2"
isograd config show run.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from isograd import screen
from isograd.errors import ConfigError, IsogradError, LaunchError
from isograd.train.stall import STALLED, happened, patience
from isograd.train.stop import PASSED_ON

if TYPE_CHECKING:
    from isograd.comm.launch import World
    from isograd.train.config import Config
    from isograd.train.opening import Opening
    from isograd.train.reading import Loaded

Parser = type[argparse.ArgumentParser]
TRAIN_END = """Any field of the config can be set here:
  --optimizer.lr 1e-3 --layout "dp4 zero2" --data.length 256

exit codes:
  0   done
  2   wrong usage or config: nothing was started
  75  asked to stop (SIGTERM, SIGUSR1, Ctrl-C or a file STOP in the run's
      folder), and saved
  6   a gradient was not finite
  7   no progress: a rank fell silent, or a connection was lost
  1   anything else"""


def train(words: list[str], kind: Parser) -> int:
    """`isograd train`: show what will be done, then start the ranks or join those that run; the exit code."""
    parser = kind(
        prog="isograd train", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train by a config. Starts local ranks itself, or joins torchrun's or Slurm's.", epilog=TRAIN_END,
    )  # fmt: skip
    _config_argument(parser)
    parser.add_argument("--nproc", type=int, help="local ranks; the layout says how many, this only checks it")
    parser.add_argument("--dry-run", action="store_true", help="check everything, take one step, keep nothing")
    _force_argument(parser)
    parser.add_argument(
        "--resume", default="auto", metavar="auto|PATH|never", help="the checkpoint to start from (default: the newest)"
    )
    parser.add_argument("--until", type=int, metavar="STEP", help="stop after this step, as if asked to")
    parser.add_argument(
        "--log-format", choices=("auto", "lines", "json"), default="auto",
        help="auto: redrawn in place on a terminal, a line a step elsewhere",
    )  # fmt: skip
    parser.add_argument("--emit", choices=("torchrun", "slurm", "k8s"), help="print what starts the run, start nothing")
    _cluster_arguments(parser)
    options, dotted = _parse(parser, words)
    loaded = _load(options.config, dotted, parser)
    if options.emit:
        from isograd.train.emit import Cluster, script

        named = {
            field: value for field in Cluster.__dataclass_fields__ if (value := getattr(options, field)) is not None
        }
        print(script(options.emit, options.config, dotted, loaded.config, Cluster(**named)))
        return 0
    if options.dry_run:
        from isograd.train.dry import dry_run

        return dry_run(_opened(loaded.config, "never", sys.stdout), force=options.force)
    return _start(loaded, options)


def config(words: list[str], kind: Parser) -> int:
    """`isograd config show` and `isograd config schema`; the exit code."""
    parser = kind(prog="isograd config", allow_abbrev=False, description="Look at configs.")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=kind, dest="verb")
    show = verbs.add_parser("show", help="every value and where it comes from", allow_abbrev=False)
    _config_argument(show)
    verbs.add_parser("schema", help="JSON schema, for editors", allow_abbrev=False)
    if words[:1] != ["show"]:
        options, extra = parser.parse_known_args(words)
        if extra:
            parser.refuse(extra)  # type: ignore[attr-defined]
        from isograd.train.config import Config

        print(json.dumps(Config.model_json_schema(), indent=2))
        return 0
    options, dotted = _parse(show, words[1:])
    _show(_load(options.config, dotted, show))
    return 0


def compare(words: list[str], kind: Parser) -> int:
    """`isograd compare`: the same run under several layouts; the exit code."""
    parser = kind(
        prog="isograd compare", allow_abbrev=False,
        description="The same run under several layouts: losses, speed, memory, bytes on the wire. Table, PNG, HTML.",
    )  # fmt: skip
    _config_argument(parser)
    parser.add_argument("--layouts", required=True, metavar="A;B;...", help="the others are compared to the first")
    _force_argument(parser)
    parser.add_argument("--out", metavar="FOLDER", help="where pictures and numbers go (default: RUN/compare)")
    options, dotted = _parse(parser, words)
    layouts = [text.strip() for text in options.layouts.split(";") if text.strip()]
    loads = {layout: _load(options.config, [*dotted, f"--layout={layout}"], parser) for layout in layouts}
    if len(loads) < 2:
        raise ConfigError(
            "IG636", "a comparison needs two layouts", seen=options.layouts, expected="two layouts or more",
            fix="--layouts 'dp4; tp2 sp dp2'",
        )  # fmt: skip
    from isograd.train.compare import compare as run
    from isograd.train.devices import this_machine
    from isograd.train.opening import opening, refuse_data

    for loaded in loads.values():
        _refuse(opening(loaded.config, this_machine()), options.force)
        refuse_data(loaded.config)
    return run({layout: loaded.config for layout, loaded in loads.items()}, options.out)


def _config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file; 'isograd recipes' lists some to start from")


def _cluster_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --emit")
    group.add_argument("--nodes", type=int, metavar="N", help="machines (default: ranks / GPUs of a machine)")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a machine (default 8, or 4)")
    group.add_argument("--cpus", type=int, metavar="N", help="CPU cores of each rank (default 8)")
    group.add_argument("--time", metavar="H:MM:SS", help="limit of the job (default 24:00:00)")
    group.add_argument("--partition", metavar="NAME", help="of Slurm (default: the cluster's)")
    group.add_argument("--image", metavar="NAME", help="container image for Kubernetes")
    group.add_argument("--claim", metavar="NAME", help="persistent volume claim for Kubernetes, mounted at /runs")


def _force_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="start although this machine has too few devices or too little memory"
    )


def _opened(config: Config, resume: str, out: TextIO) -> Opening:
    """The run and this machine, as they are shown before anything starts."""
    from isograd.train.devices import this_machine
    from isograd.train.opening import opening

    found = opening(config, this_machine())
    print(found.text(screen.width(100), resume), file=out, flush=True)
    return found


def _refuse(found: Opening, force: bool) -> None:
    """What this machine cannot hold is refused, or said when the user insists."""
    problem = found.problem()
    if problem is not None and not force:
        raise problem
    if problem is not None:
        print(f"--force: started although {problem.what}", file=sys.stderr, flush=True)


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the parser's own options, the words that set fields of the config)."""
    own = parser._option_string_actions
    mine, dotted, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and word.partition("=")[0] not in own:
            dotted.append(word)
            if "=" not in word and rest:
                dotted.append(rest.pop(0))
        else:
            mine.append(word)
            if word in own and own[word].nargs is None and rest:
                mine.append(rest.pop(0))
    return parser.parse_args(mine), dotted


def _load(path: str, dotted: list[str], parser: argparse.ArgumentParser) -> Loaded:
    from isograd.train.reading import load

    return load(path, dotted, [name.removeprefix("--") for name in parser._option_string_actions])


def _show(loaded: Loaded) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from isograd.train.reading import dotted, flat

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("field", "value", "from"):
        table.add_column(title, no_wrap=title == "field", overflow="fold")
    for place, value in flat(loaded.config):
        origin = loaded.origin(place)
        style = "dim" if origin == "default" else None
        table.add_row(Text(dotted(place)), Text(json.dumps(value)), Text(origin), style=style)
    Console(width=screen.width(140)).print(table)


def _start(loaded: Loaded, options: argparse.Namespace) -> int:
    config = loaded.config
    from isograd.layout import Layout
    from isograd.train.early import refuse_early
    from isograd.train.loop import Orders, Outcome, run
    from isograd.train.opening import refuse_data

    needed = Layout.parse(config.layout).world_size
    if options.nproc not in (None, needed):
        raise ConfigError(
            "IG637", f"layout {config.layout!r} needs {needed} ranks", seen=f"--nproc {options.nproc}",
            expected=f"--nproc {needed}, or none", fix="or give a layout for that many with --layout",
        )  # fmt: skip
    show = "live" if options.log_format == "auto" and sys.stdout.isatty() else options.log_format
    show = "lines" if show == "auto" else show
    out = sys.stderr if show == "json" else sys.stdout
    if _joins():
        if os.environ.get("RANK", "0") == "0":
            with suppress(IsogradError):  # every rank finds the same mistake itself; none may leave before the others
                _opened(config, options.resume, out)
        outcome = run(config, Orders(options.resume, show, options.until))
        return _said(outcome) if os.environ.get("RANK", "0") == "0" else outcome.code
    _refuse(_opened(config, options.resume, out), options.force)
    refuse_data(config)
    refuse_early(config, options.resume)
    if config.task == "chat":  # a conversation that cannot be learned from is refused before any rank starts
        from isograd.train.job import prepare

        prepare(config)
        refuse_data(config)
    from isograd.comm.launch import World

    orders = Orders(options.resume, show, options.until, (PASSED_ON, signal.SIGTERM))  # a group may be sent it
    ranks = World(needed, threads=config.threads, patience=patience(config.safety.stall_s))
    try:
        with ranks as world, _passes_on(world):
            outcomes: list[Outcome] = world.run(run, config, orders)
    except LaunchError:
        if happened(config.folder):
            return STALLED
        raise  # printed by the command line once every rank has ended: an error is the last thing on the screen
    return _said(outcomes[0])


def _said(outcome: object) -> int:
    from isograd.train.loop import Outcome

    assert isinstance(outcome, Outcome)
    if outcome.code:
        print(f"ended after step {outcome.step}: {outcome.why}", file=sys.stderr, flush=True)
    if outcome.code and "TORCHELASTIC_RUN_ID" in os.environ:
        print(f"this run's exit code is {outcome.code}; torchrun's own is 1, whatever its ranks end with "
              f"(a file 'exit-code' in the run's folder holds this run's)", file=sys.stderr, flush=True)  # fmt: skip
    return outcome.code


def _joins() -> bool:
    """Whether torchrun or Slurm started this process as a rank. Slurm's variables are copied to torch's names."""
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID",
             "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE"}  # fmt: skip
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "MASTER_ADDR" in os.environ:
        os.environ.update({ours: os.environ[theirs] for ours, theirs in slurm.items() if theirs in os.environ})
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def _passes_on(world: World) -> Iterator[None]:
    """While this lasts, a signal that asks to stop is passed on to all ranks; a second Ctrl-C ends at once."""

    def ask(number: int, _: object) -> None:
        """Signal every rank; arm the second Ctrl-C."""
        for pid in world.pids:
            os.kill(pid, PASSED_ON)
        if number == signal.SIGINT:
            print("stopping after this step, once it is saved; Ctrl-C again ends at once", file=sys.stderr, flush=True)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
