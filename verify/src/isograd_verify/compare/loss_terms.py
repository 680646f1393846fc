"""Compares the terms of a loss with the reference's: how much each adds to the loss that is optimised."""

from __future__ import annotations

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.terms import amounts, too_often
from isograd_verify.tell.findings import BUG, Finding
from isograd_verify.tell.wording import finding


def other_amounts(analysis: Analysis, reference: Analysis, wrong: tuple[str, ...]) -> list[Finding]:
    """Terms that count otherwise than in the reference, while another counts alike. `wrong`: gradients that differ.

    Terms are matched by their place in the program; those that are elsewhere, in their order.
    """
    ours, theirs = amounts(analysis), amounts(reference)
    moved = [site for site in ours if site not in theirs], [site for site in theirs if site not in ours]
    of = {site: site for site in ours if site in theirs}
    of |= dict(zip(*moved, strict=True)) if len(moved[0]) == len(moved[1]) else {}
    factors = {site: ours[site] / theirs[there] for site, there in of.items() if theirs[there]}
    if not any(abs(factor - 1) <= tolerances.FACTOR for factor in factors.values()):
        return []
    found = []
    for site, factor in factors.items():
        bug, axis, words = too_often(analysis, factor)
        if bug:
            sentence = (
                f"step {analysis.step}: the term of the loss at {site} counts {factor:.4g} times what it should "
                f"({words}), other terms count once"
            )
            bars = (("reference", 1.0), ("here", factor))
            found.append(finding(BUG, bug, sentence, tensors=wrong, axis=axis, coefficients=bars))
    return found
