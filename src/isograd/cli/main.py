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
import sys
from collections.abc import Callable, Sequence

from isograd import __version__
from isograd.io import terminal
from isograd_verify.command import command
from isograd_verify.io.command_line import Parser, exit_code

COMMANDS = (
    "new", "recipes", "train", "compare", "config", "data", "ckpt", "generate", "chat", "evaluate", "explain", "plan",
    "machine", "rehearse", "verify", "check", "completion",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. An IsogradError is printed without a traceback, and the code is 2."""
    return exit_code(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(words: list[str]) -> int:
    if not words:
        _parser().print_help()
        return 0
    if words[:1] == ["verify"]:
        from isograd.cli import verify

        return command(words[1:], "isograd verify", verify)
    if words[:2] == ["completion", "words"]:
        from isograd.cli.completion import candidates

        print("\n".join(candidates(words[2:], main)))
        return 0
    if words[:2] == ["config", "from"]:
        from isograd.integrations.config_from import main as config_from
        from isograd.train.reading import checked

        return config_from(words[2:], Parser, checked)
    room = _command_of(words[:1])
    if room is not None:
        return room(words[1:], Parser)
    options, extra = _parser().parse_known_args(words)
    if extra:
        options.parser.refuse(extra)
    return int(options.run(options))


def _command_of(first: list[str]) -> Callable[[list[str], type[Parser]], int] | None:
    """The command line of a room that has its own; None for the commands that are defined here."""
    if first[:1] == ["data"]:
        from isograd.cli.data import main as data

        return data
    if first[:1] == ["ckpt"]:
        from isograd.cli.checkpoint import main as ckpt

        return ckpt
    if first[:1] in (["generate"], ["chat"], ["evaluate"]):
        from isograd.cli import evaluate, generate

        return {"generate": generate.generate, "chat": generate.chat, "evaluate": evaluate.evaluate}[first[0]]
    if first[:1] == ["check"]:
        from isograd.cli.network import check

        return check
    if first[:1] == ["rehearse"]:
        from isograd.cli.rehearse import rehearse

        return rehearse
    if first[:1] in (["plan"], ["machine"]):
        from isograd.cli import plan

        return plan.plan if first[0] == "plan" else plan.machine
    if first[:1] in (["train"], ["compare"], ["config"]):
        from isograd.cli import train

        return {"train": train.train, "compare": train.compare, "config": train.config}[first[0]]
    return None


def _parser() -> Parser:
    parser = Parser(
        prog="isograd",
        description="The gradient of one device under every parallel layout, proven.",
        epilog="Start with 'isograd new quickstart', then 'isograd train quickstart.yaml'.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isograd {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="draw a layout, or print which ranks reduce each parameter's gradient",
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
    commands.add_parser("rehearse", help="simulate one step on any number of ranks, and check what they send")
    commands.add_parser("plan", help="find the best layouts of a config on many devices: memory, time, checkpoints")
    commands.add_parser("machine", help="the devices that 'isograd plan' knows; measure this computer")
    commands.add_parser("compare", help="train under several layouts and compare losses, speed, memory, bytes")
    commands.add_parser(
        "config", help="show a config's values and their origins, or the schema; convert a DeepSpeed config"
    )
    commands.add_parser("data", help="build token shards from text; inspect and verify them: see 'isograd data --help'")
    commands.add_parser("ckpt", help="inspect, verify, diff and convert checkpoints: see 'isograd ckpt --help'")
    commands.add_parser("generate", help="what a trained model writes after a prompt: see 'isograd generate --help'")
    commands.add_parser("chat", help="a conversation with a trained model: see 'isograd chat --help'")
    commands.add_parser("evaluate", help="a model's perplexity on files, and tasks of lm-eval-harness")
    commands.add_parser("check", help="check the network between a run's machines: see 'isograd check --help'")
    commands.add_parser(
        "verify", help="prove layouts, watch any program, compare recordings: see 'isograd verify --help'"
    )
    return parser


def _new(options: argparse.Namespace) -> int:
    from isograd.cli.recipes import new

    file = new(options.name, options.file)
    print(f"{file} written; it says what to do. To check it: isograd train {file} --dry-run")
    return 0


def _recipes(_: argparse.Namespace) -> int:
    from isograd.cli.recipes import listing

    print(listing(terminal.width(100)))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from isograd.cli.completion import SHELLS

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
    from isograd.core.layout import Layout

    layout = Layout.parse(options.layout)
    layout.coordinates(options.rank)
    width = options.width or terminal.width(140)
    if options.contracts is None:
        print(terminal.fold(layout.picture(), width))
        if layout.pp > 1:
            from isograd.pipeline import build, picture

            schedule = build(layout.schedule, layout.pp, layout.vpp, options.micro_batches)
            print(f"\n{picture.ascii(schedule, width=width)}")
        return 0
    from isograd.core.contract_table import contracts
    from isograd.core.mesh import Mesh
    from isograd.hf.configs import load_config
    from isograd.models import Transformer

    mesh = Mesh.unbound(layout, options.rank)
    model = Transformer(load_config(options.contracts), mesh, device="meta")
    print(contracts(model, mesh).render(width))
    return 0


if __name__ == "__main__":
    sys.exit(main())
