"""isograd on the command line. Torch is imported by the sub-command that needs it, so `isograd --help` is instant.

    isograd explain "dp2 tp2 sp zero1"                       which rank sits where
    isograd explain --contracts CONFIG "dp2 tp2 sp zero1"    who reduces each gradient, over which ranks

argparse rather than tyro at the top: importing tyro alone takes longer than `--help` may.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from isograd.errors import ConfigError, IsogradError, did_you_mean

COMMANDS = ("explain",)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        words = [w for w in sys.argv[1:2] if not w.startswith("-") and w not in COMMANDS]
        hint = did_you_mean(words[0], COMMANDS) if words and "invalid choice" in message else ""
        raise ConfigError("IG600", f"{message}{hint}", fix=f"see '{self.prog} --help'")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(arguments)
        return int(options.run(options))
    except IsogradError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> _Parser:
    parser = _Parser(prog="isograd", description="The gradient of one device under every parallel layout, proven.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="draw a layout, or print what every parameter's gradient owes under it",
        description="Draw which rank sits where in a layout. With --contracts: for every parameter of a model, who "
        "reduces its gradient, over which ranks, in which dtype, with which divisor. Needs no ranks and no weights.",
    )
    explain.add_argument("layout", help="for example 'dp2 tp2 sp zero1'")
    explain.add_argument(
        "--contracts", metavar="CONFIG",
        help="a model: a file of TransformerConfig fields (YAML or JSON), a Hugging Face config.json, or a preset",
    )  # fmt: skip
    explain.add_argument("--rank", type=int, default=0, help="from whose point of view (default 0)")
    explain.add_argument("--width", type=int, default=140, help="columns of the table (default 140)")
    explain.set_defaults(run=_explain)
    return parser


def _explain(options: argparse.Namespace) -> int:
    from isograd.layout import Layout

    layout = Layout.parse(options.layout)
    layout.coordinates(options.rank)
    if options.contracts is None:
        print(layout.picture())
        return 0
    from isograd.contract import contracts
    from isograd.mesh import Mesh
    from isograd.models import Transformer, load_config

    mesh = Mesh.unbound(layout, options.rank)
    model = Transformer(load_config(options.contracts), mesh, device="meta")
    print(contracts(model, mesh).render(options.width))
    return 0


if __name__ == "__main__":
    sys.exit(main())
