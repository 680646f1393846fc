"""isograd-verify bisect: which of several recordings, of revisions in their order, is the first wrong one?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject


def bisect(candidates: list[Path], judge: Callable[[Path], Subject]) -> Subject:
    """What is said of the first wrong recording, with a sentence of which one it is and what was compared."""
    judged: dict[int, Subject] = {}

    def verdict(number: int) -> str:
        if number not in judged:
            judged[number] = judge(candidates[number])
        return judged[number].verdict

    last = len(candidates) - 1
    if verdict(last) != BUG:
        return _noted(judged[last], f"the last recording, {candidates[last].name}, is not wrong: nothing to look for")
    right, wrong = -1, last
    if verdict(0) != BUG:
        right = 0 if verdict(0) == PASS else -1
    elif last:
        wrong = 0
    while between := [n for n in range(right + 1, wrong) if judged.get(n) is None or verdict(n) != INCONCLUSIVE]:
        middle = between[len(between) // 2]
        if verdict(middle) == BUG:
            wrong = middle
        elif verdict(middle) == PASS:
            right = middle
    open_ = [candidates[n].name for n in range(right + 1, wrong)]
    before = f"{candidates[right].name} is right" if right >= 0 else "none before it is known to be right"
    sentence = f"{candidates[wrong].name} is the first wrong recording of {len(candidates)}; {before}"
    if open_:
        sentence += f"; of {', '.join(open_)} in between nothing can be told, so it may be one of them"
    return _noted(judged[wrong], f"{sentence} ({len(judged)} compared)", inconclusive=bool(open_))


def _noted(subject: Subject, sentence: str, inconclusive: bool = False) -> Subject:
    said: Finding = Finding(INCONCLUSIVE if inconclusive else NOTE, "", sentence)
    subject.findings = [said, *subject.findings]
    return subject
