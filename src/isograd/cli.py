"""isograd on the command line. Torch is imported by the sub-command that needs it, so `isograd --help` is instant.

    isograd new quickstart                                   write a config to start from; 'isograd recipes' lists all
    isograd train quickstart.yaml                            train by a config
    isograd explain "dp2 tp2 sp zero1"                       which rank sits where
    isograd explain "pp4 vpp2 zb" --micro-batches 8          and what each pipeline rank does, when
    isograd explain --contracts CONFIG "dp2 tp2 sp zero1"    who reduces each gradient, over which ranks
    isograd data build tokens/ books/                        text into token shards
    isograd verify                                           prove layouts, watch programs, compare recordings

argparse rather than tyro at the top: importing tyro alone takes longer than `--help` may.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from isograd import __version__, screen
from isograd.errors import ConfigError, IsogradError, LaunchError, did_you_mean

if TYPE_CHECKING:
    from isograd.verify.tell.report import Report

COMMANDS = (
    "new", "recipes", "train", "compare", "config", "data", "ckpt", "explain", "plan", "machine",
    "rehearse", "verify", "check", "completion",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what argparse found as an IsogradError, with the nearest command where one was misspelled."""
        word = re.search(r"COMMAND: invalid choice: '(.*?)'", message)
        hint = did_you_mean(word[1], COMMANDS) if word else ""
        raise ConfigError("IG600", f"{message}{hint}", fix=f"see '{self.prog} --help'")

    def format_help(self) -> str:
        """The help text, no line wider than the terminal."""
        return screen.fold(super().format_help(), screen.width())

    def refuse(self, extra: list[str]) -> NoReturn:
        """Raise for arguments that no option reads: unknown options with the nearest name, words that lack quotes."""
        names = re.findall(r"--[a-z-]+", self.format_help())
        options = [word.partition("=")[0] for word in extra if word.startswith("-")]
        hints = [f"unknown option {word!r}{did_you_mean(word, names)}" for word in options]
        problem = "; ".join(hints) or f"unexpected {' '.join(extra)!r}: a layout of several words needs quotes"
        raise ConfigError("IG600", problem, fix=f"see '{self.prog} --help'")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. An IsogradError is printed without a traceback, and the code is 2."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where a reader that has left is no error
        return code
    except IsogradError as error:
        cause = error.cause if isinstance(error, LaunchError) else None
        print(cause or error, file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:  # Ctrl-C: 128 and the signal's number, as shells say
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except (
        BrokenPipeError
    ):  # the reader of a pipe has seen enough: isograd explain ... | head. 128 and SIGPIPE's number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(words: list[str]) -> int:
    if words[:1] == ["verify"]:
        from isograd.verify.command import main as verify

        return verify(words[1:], _Parser, _builtin)
    if words[:2] == ["completion", "words"]:
        from isograd.completion import candidates

        print("\n".join(candidates(words[2:], main)))
        return 0
    if words[:2] == ["config", "from-deepspeed"]:
        from isograd.doors.deepspeed.config import main as from_deepspeed
        from isograd.train.reading import checked

        return from_deepspeed(words[2:], _Parser, checked)
    room = _command_of(words[:1])
    if room is not None:
        return room(words[1:], _Parser)
    options, extra = _parser().parse_known_args(words)
    if extra:
        options.parser.refuse(extra)
    return int(options.run(options))


def _command_of(first: list[str]) -> Callable[[list[str], type[_Parser]], int] | None:
    """The command line of a room that has its own; None for the commands that are defined here."""
    if first[:1] == ["data"]:
        from isograd.data.command import main as data

        return data
    if first[:1] == ["ckpt"]:
        from isograd.checkpoint.command import main as ckpt

        return ckpt
    if first[:1] == ["check"]:
        from isograd.network.command import check

        return check
    if first[:1] == ["rehearse"]:
        from isograd.train.rehearse import rehearse

        return rehearse
    if first[:1] in (["plan"], ["machine"]):
        from isograd.train import plan

        return plan.plan if first[0] == "plan" else plan.machine
    if first[:1] in (["train"], ["compare"], ["config"]):
        from isograd.train import command

        return {"train": command.train, "compare": command.compare, "config": command.config}[first[0]]
    return None


def _parser() -> _Parser:
    parser = _Parser(
        prog="isograd",
        description="The gradient of one device under every parallel layout, proven.",
        epilog="Start with 'isograd new quickstart', then 'isograd train quickstart.yaml'.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isograd {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="draw a layout, or print what every parameter's gradient owes under it",
        description="Draw which rank sits where in a layout, and a pipeline's schedule. With --contracts: for every "
        "parameter of a model, who reduces its gradient, over which ranks, in which dtype, with which divisor. Needs "
        "no ranks and no weights.",
        allow_abbrev=False,
    )
    explain.add_argument("layout", help="for example 'dp2 tp2 sp zero1'")
    explain.add_argument(
        "--contracts", metavar="CONFIG",
        help="a model: a file of TransformerConfig fields (YAML or JSON), a Hugging Face config.json, or a preset",
    )  # fmt: skip
    explain.add_argument(
        "--micro-batches", type=_micro_batches, default=8, help="of a pipeline's schedule (default 8, at most 1000)"
    )
    explain.add_argument("--rank", type=int, default=0, help="from whose point of view (default 0)")
    explain.add_argument("--width", type=_columns, help="columns of tables and schedules (default: the terminal's)")
    explain.set_defaults(run=_explain, parser=explain)
    new = commands.add_parser(
        "new",
        help="write a recipe into this folder: a config to start from",
        description="Copy a recipe, a commented config to start from. 'isograd recipes' lists them.",
        allow_abbrev=False,
    )
    new.add_argument("name", help="for example quickstart")
    new.add_argument("file", nargs="?", help="where to write it (default: NAME.yaml in this folder)")
    new.set_defaults(run=_new, parser=new)
    listed = commands.add_parser(
        "recipes",
        help="list the recipes, one line each",
        description="List the recipes that 'isograd new NAME' writes.",
        allow_abbrev=False,
    )
    listed.set_defaults(run=_recipes, parser=listed)
    completion = commands.add_parser(
        "completion",
        help="print a script by which a shell completes commands and fields",
        description="Print a script for a shell: source <(isograd completion bash)",
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=_completion, parser=completion)
    commands.add_parser("train", help="train by a config: see 'isograd train --help'")
    commands.add_parser("rehearse", help="one step on imagined ranks of any layout, and what they send")
    commands.add_parser("plan", help="the best layouts of a config on many devices: memory, time, checkpoints")
    commands.add_parser("machine", help="the devices that plans know, and a description of this computer")
    commands.add_parser("compare", help="the same run under several layouts: losses, speed, memory, bytes")
    commands.add_parser("config", help="a config's values and their origins; the schema; a DeepSpeed config as one")
    commands.add_parser("data", help="text into token shards; inspect, verify: see 'isograd data --help'")
    commands.add_parser("ckpt", help="inspect, verify, diff and convert checkpoints: see 'isograd ckpt --help'")
    commands.add_parser("check", help="the network between a run's machines: see 'isograd check --help'")
    commands.add_parser(
        "verify", help="prove layouts, watch any program, compare recordings: see 'isograd verify --help'"
    )
    return parser


def _builtin(options: argparse.Namespace) -> Report:
    from isograd.cases import prove

    return prove(options)


def _new(options: argparse.Namespace) -> int:
    from isograd.new import new

    file = new(options.name, options.file)
    print(f"{file} written; it says what to do. To check it: isograd train {file} --dry-run")
    return 0


def _recipes(_: argparse.Namespace) -> int:
    from isograd.new import listing

    print(listing(screen.width(100)))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from isograd.completion import SHELLS

    print(SHELLS[options.shell])
    return 0


def _columns(text: str) -> int:
    if not text.isdecimal() or not 40 <= int(text[:9]) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a width from 40 to 10000")
    return int(text)


def _micro_batches(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of micro-batches from 1 to 1000")
    return int(text)


def _explain(options: argparse.Namespace) -> int:
    from isograd.layout import Layout

    layout = Layout.parse(options.layout)
    layout.coordinates(options.rank)
    width = options.width or screen.width(140)
    if options.contracts is None:
        print(screen.fold(layout.picture(), width))
        if layout.pp > 1:
            from isograd.pipeline import build, picture

            schedule = build(layout.schedule, layout.pp, layout.vpp, options.micro_batches)
            print(f"\n{picture.ascii(schedule, width=width)}")
        return 0
    from isograd.contract import contracts
    from isograd.mesh import Mesh
    from isograd.models import Transformer, load_config

    mesh = Mesh.unbound(layout, options.rank)
    model = Transformer(load_config(options.contracts), mesh, device="meta")
    print(contracts(model, mesh).render(width))
    return 0


if __name__ == "__main__":
    sys.exit(main())
