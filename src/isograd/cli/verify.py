"""What isograd adds to the verifier's command line: the proof of a case, of a run's config, and of the built-in models.

`isograd-verify` finds this module by the entry point that isograd's installation registers.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from isograd.errors import ConfigError

if TYPE_CHECKING:
    from isograd_verify.tell.report import Report

ABOUT = "Prove that layouts give the gradients of one device, in fp64, parameter by parameter."


def options(parser: ArgumentParser) -> None:
    """The options of a proof."""
    parser.add_argument(
        "case", nargs="?", help="FILE.py:FUNCTION, a function of a mesh that returns a Case; or a run's YAML"
    )
    parser.add_argument("--layouts", help="for example 'tp2 sp; dp2 zero2' (default: a standard grid)")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--taylor", action="store_true", help="test the gradient against the loss itself, no reference")
    parser.add_argument("--keep", metavar="DIR", help="leave the recordings here")
    parser.add_argument(
        "--replay-routing", action="store_true", help="where rounding decides, tokens go to one device's experts"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for one layout (default 600)"
    )


def prove(options: Namespace) -> Report:
    """The proof that the options ask for."""
    if options.case is None or options.case.endswith((".yaml", ".yml")):
        from isograd.prove.builtin_cases import prove

        return prove(options)
    if ":" not in options.case or not Path(options.case.rpartition(":")[0]).is_file():
        raise ConfigError(
            "IG620", f"no case at {options.case!r}", expected="FILE.py:FUNCTION, for example my_case.py:case",
            fix="docs/prove-your-own.md shows a case; 'isograd verify' without one proves the built-in models",
        )  # fmt: skip
    if not options.layouts:
        raise ConfigError("IG621", "which layouts?", fix="--layouts 'dp2; tp2 sp'")
    if options.taylor:
        from isograd.prove.slopes import taylor_test

        return taylor_test(options.case, options.layouts, options.timeout)
    from isograd.prove.builtin_cases import how
    from isograd.prove.prove import verify

    return verify(options.case, options.layouts, **how(options))
