"""docs/survey.md, written from programs.toml and results.json."""

from collections import Counter

UNTOLD = ("open", "truth unknown")
UNTOLD_HEAD = "## What could not be told\n\n"
OPEN = ("right", "right beside one", "open", "not seen alone")  # what may be without a note

HEAD = """# The survey

Training programs of public libraries, each used as its documentation shows it, with tiny random models, on gloo ranks
of one machine. `isograd-verify` watched them; none was written for it. Written by
`python -m verify.survey.run`; programs are in survey/programs, one line each in survey/programs.toml. Nothing is
downloaded when they run.

- **Truth** is computed without isograd, by survey/truth.py: the gradients before the first clip or step, by name,
  beside those of one process in plain torch. They are written as a sum of what each micro-batch on each rank adds to
  the gradient of one device; "right" means that all coefficients are 1 (the largest relative error of a tensor stands
  behind it). Elsewhere the coefficients are given, and how many tensors have them.
- **Alone**: `isograd-verify run`. **Beside one**: with `--beside-one`.
- **Is it?** A verdict is *right* when it says BUG of what is wrong and PASS of what is right. *Open* is INCONCLUSIVE;
  *right beside one* and *not seen alone* are an INCONCLUSIVE and a PASS that the run beside one device decides.
  *MISSED* and *FALSE ALARM* are the verifier's failures.
- **Decided**: `python -m verify.survey.decided` counts the verdicts beside one device; with `--corpus` it runs each bug
  of the corpus and its twin so, in two minutes (98 % of 121 on 2026-11-27, none wrong).
- **Judged**: when the row was last run. Rows before 2026-11-22 22:49 were judged before the changes of that evening
  to the verifier, and were not run again.
"""


def truth(said):
    known = said.get("truth")
    if not known:
        return "not computed"
    if "failed" in known:
        return f"not computed: {known['failed']}"
    if known["right"]:
        return f"right ({known['error']:.0e}, {known['tensors']} tensors)"
    if not known["missing"] and all(ones(g["of"]) for g in known["coefficients"]):
        return f"rounded: {known['error']:.0e} off"
    parts = [f"{g['tensors']} x {shown(g['of'])}" for g in known["coefficients"][:3]]
    if known["missing"]:
        parts.append(f"no gradient: {', '.join(known['missing'][:2])}")
    if known.get("copies differ"):
        parts.append(f"copies differ: {len(known['copies differ'])}")
    return "wrong: " + "; ".join(parts)


def ones(coefficients):
    return not isinstance(coefficients, str) and all(abs(c - 1) < 0.01 for c in coefficients)


def shown(coefficients):
    if isinstance(coefficients, str):
        return coefficients
    return f"({', '.join(f'{c:g}' for c in coefficients)})"


def verdict(told):
    if told is None:
        return ""
    bugs = dict.fromkeys(f["bug"] for f in told["findings"] if f["verdict"] == told["verdict"] and f["bug"])
    return f"{told['verdict']} {' '.join(bugs)}".strip()


def opinion(said):
    """Whether the verdicts are right, as far as the truth is known."""
    right = said.get("truth", {}).get("right")
    alone, beside = (said.get(way, {}).get("verdict") for way in ("alone", "beside"))
    if right is None:
        return "truth unknown"
    if "BUG" in (alone, beside):
        return "FALSE ALARM" if right else "right" if "PASS" not in (alone, beside) else "not seen alone"
    if right:
        if (alone, beside) == ("INCONCLUSIVE", "PASS"):
            return "right beside one"
        return "open" if "INCONCLUSIVE" in (alone, beside) else "right"
    return "open" if "INCONCLUSIVE" in (alone, beside) else "MISSED"


def rows(programs, state):
    for name, about in programs.items():
        said = state.get(name)
        if said is None or "alone" not in said or "failed" in said:
            continue
        found = " ".join(f"{k} {v}" for k, v in said["versions"].items() if k != "torch" or len(said["versions"]) == 1)
        yield [
            name, found, about.get("arguments", "").replace("--", ""),
            str(about.get("ranks", 2)), truth(said), verdict(said.get("alone")), verdict(said.get("beside")),
            opinion(said), said.get("judged", ""),
        ]  # fmt: skip


def reason(said, about):
    """Why nothing could be told: the note of the row, and what the verifier itself says."""
    findings = [f["sentence"] for way in ("alone", "beside") for f in said.get(way, {}).get("findings", [])]
    return "; it says: ".join([about["note"], *(f'"{sentence}"' for sentence in dict.fromkeys(findings[:1]))])


def text(programs, state):
    """The page."""
    head = ["program", "version", "arguments", "ranks", "truth", "alone", "beside one", "is it?", "judged"]
    table = [head, ["---"] * len(head), *rows(programs, state)]
    counts = Counter(row[-2] for row in table[2:])
    summary = f"{len(table) - 2} programs: {', '.join(f'{n} {kind}' for kind, n in counts.most_common())}.\n"
    parts = [HEAD, summary, "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"]
    told = {row[0]: row[-2] for row in table[2:]}
    untold = [f"- **{name}**: {reason(state[name], programs[name])}" for name, is_it in told.items() if is_it in UNTOLD]
    if untold:
        parts.append(UNTOLD_HEAD + "\n".join(untold) + "\n")
    notes = [
        f"- **{name}**: {about['note']}"
        for name, about in programs.items()
        if "note" in about and name in state and told.get(name) not in UNTOLD
    ]
    if notes:
        parts.append("## What the rows mean\n\n" + "\n".join(notes) + "\n")
    out = [f"- **{n}**: {state[n]['failed']}" for n in programs if "failed" in state.get(n, {})]
    out += [f"- **{n}**: {a['left_out']}" for n, a in programs.items() if "left_out" in a]
    if out:
        parts.append("## What does not run\n\n" + "\n".join(out) + "\n")
    return "\n".join(parts)
