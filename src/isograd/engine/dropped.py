"""Whether the step that a program wants to discard has been dropped already.

All ranks drop a step together, in its one gather: there, the rank that failed calls `discard`, and the others call
`step`, which is refused. A program whose exception handler calls `discard` on every rank therefore calls it once more
on those others. The step that they mean is gone; a second gather would meet the next step of the rank that failed, and
drop that one, and so on. So an exception carries the number of the step that was dropped with it, by a refusal or by
`discard`, and a further `discard` while that exception is handled does nothing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TypeVar

from isograd.engine.ledger import Ledger

_MARK = "_isograd_dropped"
E = TypeVar("E", bound=BaseException)


def mark(error: E, ledger: Ledger) -> E:
    """All ranks have just dropped the step in which this rank has this error."""
    with suppress(AttributeError):  # an exception class with __slots__
        setattr(error, _MARK, _step_before(ledger))
    return error


def mark_handled(ledger: Ledger) -> None:
    """All ranks have just dropped a step, perhaps in the handler of an exception."""
    error = sys.exception()
    if error is not None:
        mark(error, ledger)


def is_dropped(ledger: Ledger) -> bool:
    """Whether the program is handling the refusal of a step after which nothing has happened here. There is nothing to
    drop, either, when no step is taken any more, which all ranks know or learn at their next step."""
    if ledger.spoiled is not None and ledger.empty:
        return True
    error = sys.exception()
    while error is not None:
        if getattr(error, _MARK, None) == _step_before(ledger):
            return ledger.empty
        error = error.__context__
    return False


def _step_before(ledger: Ledger) -> tuple[int, int]:
    """Names the step that has ended last. Numbers only: an exception must not hold a model, and may be pickled."""
    return id(ledger), ledger.ended
