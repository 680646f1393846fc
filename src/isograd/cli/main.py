"""isograd on the command line. Torch is imported by the sub-command that needs it, so `isograd --help` is instant.

argparse rather than tyro at the top: importing tyro alone takes longer than `--help` may.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from isograd import __version__
from isograd.cli import LAZY_COMMANDS, main_of
from isograd.cli.subcommands import CommandParser, number
from isograd.io import terminal
from isograd_verify.command import command
from isograd_verify.io.command_line import exit_code

COMMANDS = ("explain", "new", "recipes", "completion", "verify", *LAZY_COMMANDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. An IsogradError is printed without a traceback, and has its own code."""
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

        return config_from(words[2:], CommandParser, checked)
    if words[0] in LAZY_COMMANDS:
        return main_of(words[0])(words[1:])
    options = _parser().parse_args(words)
    return int(options.run(options))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="isograd",
        description="The gradient of one device under every parallel layout, proven.",
        epilog="Start with 'isograd new quickstart', then 'isograd train quickstart.yaml'.",
    )
    parser.add_argument("--version", action="version", version=f"isograd {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, act: Callable[[argparse.Namespace], int], does: str, about: str) -> CommandParser:
        made: CommandParser = commands.add_parser(name, help=does, description=about)
        made.set_defaults(run=act, parser=made)
        return made

    explain = add(
        "explain",
        _explain,
        "draw a layout, or print which ranks reduce each parameter's gradient",
        "Draw which rank sits where in a layout, and a pipeline's schedule. With --contracts: for every parameter of a "
        "model, who reduces its gradient, over which ranks, in which dtype, with which divisor. Needs no ranks and no "
        "weights.",
    )
    explain.add_argument("layout", help="for example 'dp2 tp2 sp zero1'")
    explain.add_argument(
        "--contracts", metavar="CONFIG",
        help="a model: a file of TransformerConfig fields (YAML or JSON), a Hugging Face config.json, or a preset",
    )  # fmt: skip
    explain.add_argument(
        "--micro-batches", type=number(1, 1000), default=8, help="of a pipeline's schedule (default 8, at most 1000)"
    )
    explain.add_argument("--rank", type=int, default=0, help="from whose point of view (default 0)")
    explain.add_argument(
        "--width", type=number(40, 10_000), help="columns of tables and schedules (default: the terminal's)"
    )
    new = add(
        "new",
        _new,
        "write a recipe into this folder: a config to start from",
        "Copy a recipe, a commented config to start from. 'isograd recipes' lists them.",
    )
    new.add_argument("name", help="for example quickstart")
    new.add_argument("file", nargs="?", help="where to write it (default: NAME.yaml in this folder)")
    add("recipes", _recipes, "list the recipes, one line each", "List the recipes that 'isograd new NAME' writes.")
    completion = add(
        "completion",
        _completion,
        "print a script by which a shell completes commands and fields",
        "Print a script for a shell: source <(isograd completion bash)",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    for name, (_, about) in LAZY_COMMANDS.items():
        commands.add_parser(name, help=about)
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
