"""Which tests run how often: `make test-fast` after an edit, `make test` before a push and in CI, `make test-all`.

Fast are tests of up to two ranks that take little time. A test that uses `worlds` and whose parameters name a layout of
more than two ranks is medium, without a mark; so is what MEDIUM lists, by CPU seconds (`pytest --cpu-times FILE`,
tests/cpu_times.py), and what medium.txt lists: what took more than 0.3 s. A file marks its slow tests. Of a product
of settings (`sized`), the cases in which every pair of values meets are medium, the rest are slow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

MEASURED = frozenset(Path(__file__).with_name("medium.txt").read_text().split())

# Tests by file and the beginning of the name.
MEDIUM = {
    "parity/test_grid": "any_two_properties zero_stages reproducible no_sync working_precision",
    "parity/test_bugs": "",
    "parity/test_mutants": "",
    "parity/test_pipelines": "copies_of working_precision",
    "contrastive/test_matrix": "the_gradient_is_that_of_the_full_batch_on_one_device[cp "
    "the_gradient_is_that_of_the_full_batch_on_one_device[tp",
    "contrastive/test_grad_cache": "messages_follow a_second_loss dropout_of",
    "contrastive/test_front_ends": "clip_loss",
    "checkpoint/test_experts": "",
    "checkpoint/test_resume": "the_same_layout joined another_model a_rank_reads masters",
    "checkpoint/test_hugging": "every_family a_model_of_transformers",
    "checkpoint/test_command": "diff inspect convert",
    "checkpoint/test_damage": "damage_that_one_rank",
    "plan/test_rehearse": "",
    "pipeline/test_refusals": "real_processes a_failing_stage fewer_micro",
    "sequence/test_hugging": "the_verifier_proves and_so_it_has",
    "train/test_command": "",
    "train/test_loop": "",
    "train/test_peers": "",
    "engine/test_accumulation": "any_interleaving",
    "engine/test_experts": "experts_train",
    "engine/test_experts_mutants": "",
    "engine/test_ledger": "a_random_sequence_gives_the_gradient_of_its_definition_or_is_refused[4",
    "engine/test_data_parallel": "weighed_backwards_give_the_gradient_of_one_device_whichever_sync[4",
    "engine/test_first": "no_rank_ever",
    "engine/test_matrices": "muon_steps_each_experts",
    "engine/test_units": "compiled synced_and_unsynced",
    "engine/test_terms": "each_term_is_divided_by_its_own_weight[3",
    "engine/test_engine": "a_compiled_module",
    "comm/test_imagined": "the_record_of",
    "comm/test_launch": "functions_of_a_notebook ranks_die a_hang",
    "verify/test_html": "",  # in chromium
}


def pairwise(cases: Iterable[Case], values: Callable[[Any], Sequence[Hashable]] = tuple) -> list[Case]:
    """As few cases as a greedy choice finds in which any two values that meet in some case meet."""
    pairs = {case: {*combinations(enumerate(values(case)), 2)} for case in cases}
    chosen: list[Case] = []
    left = set().union(*pairs.values())
    while left:
        chosen.append(max(pairs, key=lambda case: len(pairs[case] & left)))
        left -= pairs[chosen[-1]]
    return chosen


def sized(
    cases: Sequence[tuple[Any, ...]], values: Callable[[Any], Sequence[Hashable]], fast: Callable[[Any], bool]
) -> list[Any]:
    """The cases as parameters of a test: unmarked when `fast`, medium when `pairwise` chose them, else slow."""
    medium = set(pairwise(cases, values))
    size = {case: () if fast(case) else pytest.mark.medium if case in medium else pytest.mark.slow for case in cases}
    return [pytest.param(*case, marks=size[case]) for case in cases]


def mark(item: pytest.Item) -> None:
    """Mark a collected test by its parameters and by MEDIUM."""
    file, _, test = item.nodeid.removeprefix("tests/").partition(".py::test_")
    listed = file in MEDIUM and test.startswith(tuple(MEDIUM[file].split()) or "")
    listed |= item.nodeid.removeprefix("tests/").replace(".py", "").partition("[")[0] in MEASURED
    if listed or _most_ranks(item) > 2:
        item.add_marker("medium")


def _most_ranks(item: pytest.Item) -> int:
    if not (isinstance(item, pytest.Function) and hasattr(item, "callspec") and "worlds" in item.fixturenames):
        return 1
    layouts = [value for value in item.callspec.params.values() if isinstance(value, str)]
    return max((prod(map(int, re.findall(r"\b[dctp]p(\d+)", layout))) for layout in layouts), default=1)
