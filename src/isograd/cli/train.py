"""isograd train, compare and config: the command line of runs. Torch is not imported before a run starts."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from isograd.cli.subcommands import CommandParser, load_config, number, parse_fields
from isograd.errors import ConfigError
from isograd.io import terminal
from isograd.train.run.signals import SignalListener

if TYPE_CHECKING:
    from isograd.train.config import Config
    from isograd.train.reading import LoadedConfig

STEP = number(1, 10**18)
CONFIG = "a YAML file; 'isograd recipes' lists some to start from"
FORCE = "start although this machine has too few devices or too little memory"
EMITTED = ("torchrun", "slurm", "k8s", "jobset", "pytorchjob", "skypilot")
TRAIN_END = """Any field of the config can be set here:
  --optimizer.lr 1e-3 --layout "dp4 zero2" data.length=256

exit codes:
  0   done
  2   wrong usage or config: nothing was started
  75  asked to stop (SIGTERM, SIGUSR1, SIGHUP, Ctrl-C or a file STOP in the
      run's folder), and saved; before the first step there is nothing to save
  6   a gradient was not finite
  7   no progress: a rank stopped responding, or a connection was lost
  1   anything else"""


def train(words: list[str]) -> int:
    """`isograd train`: show what will be done, then start the ranks or join those that run; the exit code."""
    parser = CommandParser(
        prog="isograd train", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train by a config. Starts local ranks itself, or joins torchrun's or Slurm's.", epilog=TRAIN_END,
    )  # fmt: skip
    parser.add_argument("config", help=CONFIG)
    parser.add_argument("--nproc", type=int, help="local ranks; the layout says how many, this only checks it")
    parser.add_argument("--dry-run", action="store_true", help="check everything, take one step, keep nothing")
    parser.add_argument("--force", action="store_true", help=FORCE)
    parser.add_argument(
        "--resume", default="auto", metavar="auto|PATH|never", help="the checkpoint to start from (default: the newest)"
    )
    parser.add_argument(
        "--profile", type=_steps, metavar="STEPS", help="trace these steps by torch's profiler, such as 5 or 5-7"
    )
    parser.add_argument("--until", type=STEP, metavar="STEP", help="stop after this step, as if asked to")
    parser.add_argument(
        "--log-format", choices=("auto", "lines", "json"), default="auto",
        help="auto: redrawn in place on a terminal, a line a step elsewhere",
    )  # fmt: skip
    parser.add_argument("--emit", choices=EMITTED, help="print what starts the run, start nothing")
    _cluster_arguments(parser)
    options, dotted = parse_fields(parser, words)
    if options.emit:
        from isograd.train.run.emit import Cluster, script

        named = {
            field: value for field in Cluster.__dataclass_fields__ if (value := getattr(options, field)) is not None
        }
        print(script(options.emit, options.config, dotted, load_config(options.config, dotted, parser).config,
                     Cluster(**named)))  # fmt: skip
        return 0
    from isograd.train.reading import fetched

    if options.dry_run:
        config = fetched(load_config(options.config, dotted, parser).config)
        _refuse_count(config, options.nproc)
        from isograd.train.run.start import print_summary
        from isograd.train.startup import dry_run

        return dry_run(print_summary(config, "never", sys.stdout), force=options.force)
    with closing(SignalListener()) as listener:  # before torch is imported, which takes seconds
        config = fetched(load_config(options.config, dotted, parser).config)
        _refuse_count(config, options.nproc)
        if options.profile and options.profile[1] > config.steps:
            raise ConfigError(
                "IG600", "--profile asks for steps after the last", seen=f"step {options.profile[1]}",
                expected=f"at most {config.steps}, the steps of the run",
            )  # fmt: skip
        from isograd.train.loop import RunOptions
        from isograd.train.run.start import start

        show = "live" if options.log_format == "auto" and sys.stdout.isatty() else options.log_format
        show = "lines" if show == "auto" else show
        given = RunOptions(options.resume, show, options.profile, options.until)
        return start(config, listener, given, force=options.force)


def _refuse_count(config: Config, nproc: int | None) -> None:
    from isograd.core.layout import Layout

    needed = Layout.parse(config.layout).world_size
    if nproc not in (None, needed):
        raise ConfigError(
            "IG637", f"layout {config.layout!r} needs {needed} ranks", seen=f"--nproc {nproc}",
            expected=f"--nproc {needed}, or none", fix="or give a layout for that many with --layout",
        )  # fmt: skip


def config(words: list[str]) -> int:
    """`isograd config show` and `isograd config schema`; the exit code."""
    parser = CommandParser(prog="isograd config", description="Look at configs.")
    verbs = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=CommandParser, dest="verb"
    )
    show = verbs.add_parser("show", help="every value and where it comes from")
    show.add_argument("config", help=CONFIG)
    verbs.add_parser("schema", help="JSON schema, for editors")
    verbs.add_parser("from", help="a config of DeepSpeed, Megatron, NeoX, accelerate, Trainer")
    if words[:1] != ["show"]:
        parser.parse_args(words)
        from isograd.train.config import Config

        print(json.dumps(Config.model_json_schema(), indent=2))
        return 0
    options, dotted = parse_fields(show, words[1:])
    _show(load_config(options.config, dotted, show))
    return 0


def compare(words: list[str]) -> int:
    """`isograd compare`: the same run under several layouts, or runs that are over; the exit code."""
    parser = CommandParser(
        prog="isograd compare",
        description="The same run under several layouts: losses, speed, memory, bytes on the wire. Table, PNG, JSON. "
        "With folders of runs in place of a config: what they have logged.",
    )  # fmt: skip
    parser.add_argument(
        "config", help="a YAML file; or the folder of a run, and then more of them", metavar="CONFIG|RUN"
    )
    parser.add_argument("runs", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--layouts", metavar="A;B;...", help="the others are compared to the first")
    parser.add_argument("--force", action="store_true", help=FORCE)
    parser.add_argument("--out", metavar="FOLDER", help="where pictures and numbers go (default: RUN/compare)")
    options, dotted = parse_fields(parser, words)
    if options.layouts is None and not Path(options.config).is_dir():
        parser.error("the following arguments are required: --layouts (or folders of runs in the place of a config)")
    if options.layouts is None:
        from isograd.train.compare import compare_runs

        return compare_runs([Path(name) for name in (options.config, *options.runs)], options.out)
    layouts = [text.strip() for text in options.layouts.split(";") if text.strip()]
    loads = {layout: load_config(options.config, [*dotted, f"--layout={layout}"], parser) for layout in layouts}
    if len(loads) < 2:
        raise ConfigError(
            "IG636", "a comparison needs two layouts", seen=options.layouts, expected="two layouts or more",
            fix="--layouts 'dp4; tp2 sp dp2'",
        )  # fmt: skip
    from isograd.train import resources
    from isograd.train.compare import compare as run
    from isograd.train.run.start import refuse
    from isograd.train.startup import refuse_data, summarize

    for loaded in loads.values():
        refuse(summarize(loaded.config, resources.this_machine(loaded.config.device)), options.force)
        refuse_data(loaded.config)
    return run({layout: loaded.config for layout, loaded in loads.items()}, options.out)


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    found = STEP(first), STEP(last if dash else first)
    if found[1] < found[0]:
        raise argparse.ArgumentTypeError(f"{text!r}: the last step comes before the first")
    return found


def _cluster_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --emit")
    group.add_argument("--nodes", type=int, metavar="N", help="machines (default: ranks / GPUs of a machine)")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a machine (default 8, or 4)")
    group.add_argument("--cpus", type=number(1, 1 << 20), metavar="N", help="CPU cores of each rank (default 8)")
    group.add_argument("--time", metavar="H:MM:SS", help="limit of the job (default 24:00:00)")
    group.add_argument("--partition", metavar="NAME", help="of Slurm (default: the cluster's); SkyPilot: the GPU")
    group.add_argument("--image", metavar="NAME", help="container image for Kubernetes and SkyPilot")
    group.add_argument("--claim", metavar="NAME", help="volume (claim) for Kubernetes and SkyPilot, mounted at /runs")


def _show(loaded: LoadedConfig) -> None:
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
    Console(width=terminal.width(140)).print(table)
