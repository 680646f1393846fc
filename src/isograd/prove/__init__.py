"""The engine's own proof: a model's gradients under many layouts against one device.

isograd.verify(case, layouts)                      the report; the same as isograd.prove.verify
isograd.prove.assert_same_gradients(case, layouts) for test suites
isograd.prove.Case(model, batch, loss=...)         what a case function returns
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isograd import lazily

if TYPE_CHECKING:
    from isograd.prove.case import Case as Case
    from isograd.prove.prove import assert_same_gradients as assert_same_gradients
    from isograd.prove.prove import verify as verify
    from isograd.prove.slopes import taylor_test as taylor_test

__getattr__ = lazily(__name__, {"case": "Case", "prove": "assert_same_gradients verify", "slopes": "taylor_test"})
