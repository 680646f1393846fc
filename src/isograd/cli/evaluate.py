"""isograd evaluate: how good a model is, on files of text and on tasks of lm-eval-harness."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isograd.cli.generate import PLACE, POSITIVE
from isograd.cli.subcommands import CommandParser

if TYPE_CHECKING:
    from isograd.core.layout import Layout


def evaluate(words: list[str]) -> int:
    """`isograd evaluate`: the exit code."""
    parser = CommandParser(
        prog="isograd evaluate",
        description="How probable a model finds texts, and what it reaches in tasks of lm-eval-harness.",
    )  # fmt: skip
    parser.add_argument("place", metavar="PLACE", help=PLACE)
    parser.add_argument(
        "--files", nargs="+", default=[], metavar="FILE", help="texts; .jsonl, .parquet: text, or conversations"
    )
    parser.add_argument("--tasks", metavar="NAMES", help="of lm-eval-harness, with commas between them")
    parser.add_argument("--task-folder", metavar="DIR", help="of tasks as YAML, whose code is run")
    parser.add_argument("--limit", type=POSITIVE, metavar="N", help="documents of a task (default: all)")
    parser.add_argument("--layout", help="default: the run's, without pp and zero; of a Hugging Face folder dp1")
    parser.add_argument("--length", type=POSITIVE, metavar="N", help="tokens of a row (default: at most 1024)")
    parser.add_argument("--batch", type=POSITIVE, default=8, metavar="N", help="rows of a data rank at once (8)")
    parser.add_argument("--tokenizer", metavar="DIR", help="a folder with a tokenizer.json, or bytes")
    parser.add_argument("--device", choices=("cpu",), help="cpu: on the CPU on purpose")
    parser.add_argument("--json", action="store_true", help="write one line of JSON")
    options = parser.parse_args(words)
    if not options.files and not options.tasks:
        parser.error("give --files FILE ..., or --tasks NAMES")
    from isograd.generate.harness import need
    from isograd.generate.scoring import texts_of
    from isograd.generate.writer import hugging_folder, tokenizer_of
    from isograd.launcher.launch import launch

    if options.tasks:
        need()
    layout = _layout(options)
    for _ in texts_of(options.files, tokenizer_of(options.place, options.tokenizer)):
        pass  # a file that is refused is refused before a checkpoint is converted
    with hugging_folder(options.place, options.tokenizer) as (folder, tokenizer):
        given = (str(folder), tokenizer, str(layout), vars(options))
        alone = layout.world_size == 1
        found = _measured(*given) if alone else launch(_measured, layout.world_size, *given, device=options.device)[0]
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<28}{value:,.4f}".rstrip("0").rstrip(".") for name, value in found.items()))
    return 0


def _layout(options: argparse.Namespace) -> Layout:
    """What was asked for, or what the run of a place trains under."""
    from isograd.core.layout import Layout
    from isograd.generate.writer import config_beside

    text = options.layout or str((config_beside(Path(options.place)) or {}).get("layout", "dp1"))
    found = Layout.parse(text)
    return found if options.layout else replace(found, pp=1, vpp=1, schedule="1f1b", zero=0)


def _measured(folder: str, tokenizer: str, layout: str, options: dict[str, Any]) -> dict[str, float]:
    """On each rank."""
    from isograd.core.mesh import Mesh
    from isograd.generate.harness import harness
    from isograd.generate.scoring import scorer_of, texts_of
    from isograd.generate.writer import words_of

    mesh = Mesh(layout, options["device"])
    scorer = scorer_of(folder, words_of(tokenizer), mesh, options["length"], options["batch"])
    found = scorer.perplexity(texts_of(options["files"], tokenizer)) if options["files"] else {}
    tasks = [name.strip() for name in (options["tasks"] or "").split(",") if name.strip()]
    if tasks:
        found |= harness(scorer, tasks, options["task_folder"], options["limit"])
    return found
