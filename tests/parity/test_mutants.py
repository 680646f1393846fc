"""No mutant survives the parity grid, and every reduction in the source has its mutants.

A mutant is killed by a number that differs from one device's, or by an error of isograd's own, with its code. A rank
that hangs, dies or raises anything else kills no mutant: that may come from how the defect was planted.

    python -m tests.parity.test_mutants [WORD ...]   # all mutants, or those with a word in their name
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path

import pytest

from isograd.errors import IsogradError, LaunchError
from isograd.launcher.launch import World
from tests.sizes import few

from . import mutants, sparse
from .cases import Case, Text, Trained

TABLE = Path(__file__).parents[2] / "notes" / "mutants.md"

# Parity cases of 4 ranks, tried in this order until one fails.
KILLERS = (
    Case("dp2 tp2 sp zero1", "llama", 3),
    Case("dp2 tp2 zero0", "gpt2", 3),
    Case("dp2 tp2 sp zero2", "gpt2", 3),
    Case("tp4 sp", "qwen", 3),
    Case("tp4", "qwen", 1),
    Case("dp2 tp2 sp zero1", "llama", 3, reproducible=True),
)

# And those that cut sequences, for what only they run.
KILLERS_OF_CP = (
    Case("cp2 ulysses tp2 sp zero1", "gpt2", 3),
    Case("cp2 ring tp2 sp", "qwen", 3, text=Text(packed=True)),
    Case("cp4 ulysses2", "nine", 3),
)


# And those that are pipelines.
KILLERS_OF_PP = (
    Case("dp2 pp2 zb zero1", "deep-tied", 3),
    Case("pp2 vpp2 zb tp2 sp zero1", "deep-tied", 5, recompute=True),
    Case("pp2 vpp2 zb dp2 zero1", "deep", 2, recompute=True),
    Case("pp2 tp2 sp zero2", "deep", 2),
)


# And those with experts, which test_experts.py runs without a mutant.
KILLERS_OF_EXPERTS = (
    sparse.Case("dp2 tp2 ep2", 1, "one, shared", "lagged", 1, False),
    sparse.Case("dp2 tp2 sp ep4", 1, "two", "sequence", 1, False),
    sparse.Case("dp2 cp2 ring ep2", 0, "tight", "sequence", 1, False),
    sparse.Case("dp2 tp2 ep2", 3, "tight", "sequence", 1, False),
    sparse.Case("dp2 tp2 ep2", 2, "sigmoid, dense first", "sequence", 1, False),
    sparse.Case("dp2 tp2 sp ep4", 2, "one, shared", "sequence", 1, False),
    sparse.Case("dp2 tp2 ep2", 0, "two", "batch", 4, True),
)
OF_EXPERTS = (
    "nn/moe.py",
    "nn/balance.py",
    "core/step_counters.py",
    "comm/ops.py:move:raw.exchange",
    "experts: ",
)


# And what only ZeRO 3 runs.
KILLERS_OF_ZERO3 = (Case("dp2 tp2 sp zero3", "llama", 3),)


def killers(name: str) -> tuple[Case | sparse.Case, ...]:
    if name.startswith(OF_EXPERTS) or "router" in name or "shared_gate" in name:
        return KILLERS_OF_EXPERTS
    if name.startswith("engine/zero3/param_group.py"):
        return KILLERS_OF_ZERO3
    if name.startswith(("pipeline", "engine/engine.py:evaluate")):
        return KILLERS_OF_PP
    return KILLERS_OF_CP if name.startswith(("sequence", "comm/ops.py:move:")) else KILLERS


CONSEQUENCES = ("IG805",)  # refusals that only tell that another rank has ended, for whatever reason


def run_mutated(name: str | None, case: Case | sparse.Case) -> Trained | sparse.Run | str:
    """The case in this rank with the defect. An error of isograd's own is an answer, too; any other ends the world."""
    with nullcontext() if name is None else mutants.mutated(name):
        try:
            return case.run()
        except IsogradError as error:
            if error.code in CONSEQUENCES:
                raise
            return f"{error.code}: {error.what}"


def test_name(case: Case | sparse.Case) -> str:
    if isinstance(case, sparse.Case):
        return f"test_experts_train_as_on_one_device[{case}]"
    if case.reproducible:
        return f"test_reproducible_trains_as_one_device_does[{case.layout}-{case.model}]"
    if case in KILLERS_OF_CP:
        how = "packed" if case.text.packed else "causal"
        return f"test_a_cut_sequence_trains_as_one_device_does[{case.layout}-{case.model}-{how}-{case.accumulation}]"
    if case in KILLERS_OF_ZERO3:
        place = f"{case.layout.removesuffix(' zero3')}-{case.model}-{case.accumulation}"
        return f"test_stage_3_trains_as_one_device_does_with_the_bits_of_stage_1[{place}]"
    if case in KILLERS_OF_PP:
        how = "-recompute" if case.recompute else ""
        return f"test_a_pipeline_trains_as_one_device_does[{case.layout}-{case.model}-{case.accumulation}{how}]"
    return f"test_a_layout_trains_as_one_device_does[{case.layout}-{case.model}-{case.accumulation}]"


test_name.__test__ = False  # type: ignore[attr-defined]


def killed_by(world: World, name: str) -> tuple[str, str] | None:
    """(the parity test that fails under this mutant, how it fails), or None when the mutant survives them all."""
    for case in killers(name):
        try:
            results = world.run(partial(run_mutated, name, case), timeout=60)
        except LaunchError:  # a hang or a crash kills no mutant; the next run starts the world anew
            continue
        refusals = [r for r in results if isinstance(r, str)]
        if refusals:
            world.close(kill=True)  # what the ranks did not receive must not reach the next case
            return test_name(case), refusals[0][:90]
        wrong = case.wrong(results)
        if wrong:
            return test_name(case), wrong[0][:90]
    return None


@lru_cache
def written_table() -> dict[str, str]:
    """mutant -> killing test, as notes/mutants.md has it."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1].strip("`") for row in rows}


def sampled(number: int, name: str) -> bool:
    """Whether `make test` plants this mutant: every twentieth, and none of experts, which are slow to kill."""
    return number % 20 == 7 and killers(name) is not KILLERS_OF_EXPERTS


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (not sampled(i, n))) for i, n in enumerate(mutants.names())],
)
def test_no_mutant_survives(worlds, name: str) -> None:
    death = killed_by(worlds(4), name)
    assert death is not None, f"{name} survives: the parity grid has a hole"
    assert written_table().get(name) == death[0], "run python -m tests.parity.test_mutants to write notes/mutants.md"


INNOCENT = (*KILLERS, *KILLERS_OF_CP, *KILLERS_OF_PP, *KILLERS_OF_ZERO3)
FIRST = (KILLERS[0], KILLERS_OF_CP[0], KILLERS_OF_PP[0], KILLERS_OF_ZERO3[0])  # they kill nearly all


@pytest.mark.parametrize("case", few(INNOCENT, slow={*INNOCENT} - {*FIRST}), ids=test_name)
def test_without_a_mutant_the_same_cases_pass(worlds, case: Case) -> None:
    """The killers do not kill the innocent."""
    assert not case.wrong(worlds(4).run(partial(run_mutated, None, case)))


def test_every_call_of_a_collective_has_mutants_or_a_reason(worlds) -> None:
    found = {str(site) for site in mutants.sites()}
    assert not mutants.EXEMPT.keys() - found, "reasons for calls that no longer exist"
    assert all(mutants.ways(site) for site in mutants.sites() if str(site) not in mutants.EXEMPT)


def write_table(words: list[str]) -> None:
    before = {line.split("`")[1]: line for line in TABLE.read_text().splitlines() if line.startswith("| `")}
    lines = [
        "# Mutants: isograd broken on purpose",
        "",
        "Each row is one defect planted in isograd (tests/parity/mutants.py) and the first parity test",
        "(tests/parity/test_grid.py, test_pipelines.py, test_zero3.py, test_experts.py) that fails under it.",
        "`make full` plants them all again and holds this table to what it sees. Ranks that hang or crash kill no",
        "mutant.",
        "Written by `python -m tests.parity.test_mutants`.",
        "",
        "| mutant | killed by | how |",
        "|---|---|---|",
    ]
    survivors = []
    with World(4) as world:
        for name in mutants.names():
            if words and name in before and not any(word in name for word in words):
                lines.append(before[name])
                continue
            death = killed_by(world, name)
            print(f"{name}: {death or 'SURVIVES'}", flush=True)
            if death is None:
                survivors.append(name)
            else:
                how = death[1].replace("|", "/").replace("`", "'")
                lines.append(f"| `{name}` | `{death[0]}` | {how} |")
    lines += ["", "Calls that need no mutant, and why:", ""]
    lines += [f"- `{site}`: {reason}" for site, reason in mutants.EXEMPT.items()]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")
    if survivors:
        raise SystemExit(f"survivors: {survivors}")


if __name__ == "__main__":
    write_table(sys.argv[1:])
