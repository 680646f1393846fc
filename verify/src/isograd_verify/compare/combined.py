"""One device's gradient of a step, put together from backwards that a world of one did one by one (watch/feed.py).

On the rows of one rank a loss divides by the labels of these rows, or of other data. So each backward's gradient is
scaled until every label weighs in it what a label of the whole step weighs on one device (shares.py). Where that cannot
be known, the comparison is refused (NoReference).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from isograd_verify import tolerances
from isograd_verify.compare.loss_terms import same_loss
from isograd_verify.compare.same_data import contents, same_data
from isograd_verify.compare.shares import SAME_DATA, Again, Mixed, NoReference, counts_all, own_factor, shares
from isograd_verify.compare.values import whole_values
from isograd_verify.errors import VerifyError
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record import events
from isograd_verify.record.recording import WEIGHTS, RankRecord, RankWriter, Recording, load
from isograd_verify.record.sketch import dtype_name
from isograd_verify.tell.findings import listed

HALF = (torch.bfloat16, torch.float16)
DIFFERENT = 16  # numbers of a tensor, from which on it is no chance that half precision has them all


def distinct(candidate: Recording, step: int = 1) -> list[int]:
    """Ranks with data of their own in a step: of several that were given the same, the first."""
    seen: dict[tuple[str, ...], int] = {}
    for record in candidate.ranks:
        given = [
            f"{e.micro} {name} {t.hash}" for e in record.of(events.ForwardInputs, step) for name, t in e.tensors.items()
        ]
        labels = [f"{e.micro} {e.labels}" for e in record.of(events.LabelWeight, step)]
        seen.setdefault((*given, *labels) or (str(record.rank),), record.rank)
    return list(seen.values())


def turns(candidate: Recording) -> int:
    """How many steps make one round, in which optimizers step in turn (a GAN's two); 1: each step is like another."""
    stepped = [
        {name for name, about in candidate.ranks[0].of(events.Step, step)[0].parameters.items() if about.trainable}
        for step in candidate.steps
    ]
    size = next((n for n, names in enumerate(stepped[1:], 1) if names == stepped[0]), len(stepped))
    apart = all(not one & other for one, other in combinations(stepped[:size], 2))
    return size if stepped and apart and all(stepped) else 1


def turn(one: Recording, step: int) -> Recording:
    """A recording whose first step is another one of it."""
    own, found = one.ranks[0], Recording(one.path)
    held = [replace(event, step=1) for event in own.events if event.step == step]
    found.ranks, found.about = [replace(own, events=held, _steps={1: own.tensors(step)})], one.about
    return found if step > 1 else one


def one_model(one: Recording, candidate: Recording) -> None:
    """One device has all of the model, not a part that a number of ranks of the program's own cuts."""
    steps = [next(iter(record.of(events.Step, 1)), None) for record in candidate.ranks]
    for name, about in one.ranks[0].of(events.Step, 1)[0].parameters.items():
        held = [step.parameters[name] for step in steps if step is not None and name in step.parameters]
        same_shape = all(part.box is None and part.shape == about.shape for part in held)
        if same_shape and len({part.before for part in held}) > 1 and about.before in {part.before for part in held}:
            raise NoReference(
                f"{name} is on one device what one rank holds of it: the program cuts its model by a number of ranks "
                "of its own, or copies begin apart",
                "take the number of ranks from torch.distributed.get_world_size(), where the model is cut, too",
            )


def saw_the_same(one: Recording, candidate: Recording) -> bool:
    """Whether a first step in a world of one was given by itself what the ranks were given."""
    if not contents(one):
        return False
    try:
        same_data(one, candidate)
    except VerifyError as error:
        if error.code != "IG722":
            raise
        return False
    return True


def combine(
    candidate: Recording, alone: Recording, again: list[Again], writer: RankWriter, scale: dict[str, float],
    together: bool,
) -> list[float]:  # fmt: skip
    """Writes one step of one device, and returns the factor of each backward. `alone`: the program's own first step
    there. `together`: each of `again` was given the rows of all ranks. `scale` gets what `shares` says of it."""
    weights_stayed(candidate, alone, again)
    if together:
        same_losses(candidate, again)
        counts_all(alone, again)
        factors = [own_factor(alone)] * len(again)
    else:
        same_outputs(candidate, again)
        same_beginnings(candidate, again)
        factors = shares(alone, again, scale)
    _write(candidate, alone, again, factors, writer)
    return factors


def at_once(candidate: Recording, alone: Recording, whole: list[Again], reference: Recording) -> dict[str, float]:
    """Errors of one device's first step against itself when each of `whole` was given the rows of all ranks, where it
    then has their loss to rounding: with a batch norm or a balance loss it has not. Right gradients are left out."""
    weights_stayed(candidate, alone, whole)
    limit, factor = _limit(whole[0]), own_factor(alone)
    kept = [value for one in whole for value in one.record.group(one.step, "final").values()]
    if limit > tolerances.LIMITS["float32"][1] or any(map(in_half, kept)):
        return {}
    losses = [float(v) for r in candidate.ranks for name, v in r.tensors(1).items() if name.startswith("root/")]
    if max(losses) - min(losses) <= limit * max(map(abs, losses)):
        return {}  # the loss is one number whatever the rows are, as that of DPO is at its beginning
    same_losses(candidate, whole, limit / 300)
    counts_all(alone, whole)
    truth, found = reference.ranks[0].group(1, "sum"), dict[str, float]()
    size = 1e-3 * max((float(value.norm()) for value in truth.values()), default=0.0)
    totals = ((name, _total([(one, factor, f"sum/{name}") for one in whole])) for name in truth)
    sums = {name: ours for name, ours in totals if ours is not None}
    along, squares = sum(float(t @ truth[n]) for n, t in sums.items()), sum(float(t @ t) for t in sums.values())
    times = along / squares if factor != 1 and squares else 1.0  # else by a number that was counted in fewer rows
    for name, ours in sums.items():
        value = truth[name]
        error = float((times * ours - value).norm()) / max(float(value.norm()), size)
        if error > 10 * limit:
            found[name] = error
    return found


def in_half(value: Tensor) -> bool:
    """Whether all numbers of a gradient, many different ones, are of half precision: it was computed so."""
    return any(torch.equal(value.to(half).to(value.dtype), value) for half in HALF) and len(value.unique()) >= DIFFERENT


def other_terms(candidate: Recording, whole: list[Again]) -> list[str]:
    """Where a term of the loss is made that is another one given all ranks' rows (`whole`), while others are not."""
    ranks, same = distinct(candidate), dict[str, bool]()
    for one in whole:
        ours = _terms(one.record, one.step, 0)
        theirs = [_terms(candidate.ranks[rank], one.of, one.micro) for rank in ranks]
        for site, share in ours.items():
            known = [of[site] for of in theirs if site in of]
            same[site] = same.get(site, True) and len(known) == len(ranks) and same_loss(share, known, _limit(one))
    return [site for site, equal in same.items() if not equal] if any(same.values()) else []


def _terms(record: RankRecord, step: int, micro: int) -> dict[str, float]:
    shares: dict[str, float] = {}
    for event in record.of(events.LossTerm, step):
        if event.micro == micro:
            shares[event.site] = shares.get(event.site, 0.0) + event.share
    return shares


def weights_before(candidate: Recording, step: int) -> dict[str, Tensor]:
    """All weights, whole, with which a step began; refused where a part of them is not known, or where it belongs."""
    analysis = Analysis(candidate, step)
    held = whole_values(analysis, "parameter")
    for name in analysis.names:
        declared = all(analysis.about[rank][name].box is not None for rank in analysis.holders(name))
        if not isinstance(held.get(name), Tensor) or not (declared or len(analysis.replica_sets(name)) == 1):
            raise NoReference(f"of {name} it is not known which part each rank held before step {step}", SAME_DATA)
    return {name: value.contiguous() for name, value in held.items() if isinstance(value, Tensor)}


def _write(
    candidate: Recording, alone: Recording, again: list[Again], factors: list[float], writer: RankWriter
) -> None:
    own, step = alone.ranks[0], again[0].of
    names = list(dict.fromkeys(name for one in again for name in one.record.group(one.step, "sum")))
    tensors = {name: t for name, t in own.tensors(1).items() if name.startswith(("parameter/", "along/parameter/"))}
    if step > 1:
        tensors = {f"parameter/{name}": t for name, t in load(candidate.path / WEIGHTS.format(step)).items()}
    sums = list(dict.fromkeys(p for one in again for p in one.record.tensors(one.step) if p.startswith("along/final/")))
    for kept in (*(f"{kind}/{name}" for kind in ("sum", "final") for name in names), *sums):
        total = _total([(one, share, kept) for one, share in zip(again, factors, strict=True)])
        if total is not None:
            tensors[kept] = total
    for number, (one, share) in enumerate(zip(again, factors, strict=True)):
        for part, value in one.record.group(one.step, "part").items():
            micro, _, name = part.partition("/")
            assert events.micro_of(int(micro)) == 0
            tensors[f"part/{events.key(number, events.use_of(int(micro)))}/{name}"] = share * value
        for choice, value in one.record.group(one.step, "choice").items():
            tensors[f"choice/{number}/{choice.partition('/')[2]}"] = value
        for event in one.record.of(events.Backward, one.step):
            writer.event(replace(event, step=step, micro=number))
        for given in one.record.of(events.ForwardInputs, one.step):
            writer.event(replace(given, step=step, micro=number, forward=number))
        for weight in one.record.of(events.LabelWeight, one.step):
            writer.event(replace(weight.times(share), step=step, micro=number))
        for term in one.record.of(events.LossTerm, one.step):
            weights = tuple(share * weight for weight in term.weights)
            writer.event(replace(term, step=step, micro=number, weights=weights))
    first, found = own.of(events.Step, 1)[0], {}
    for name, about in first.parameters.items():
        final, had = tensors.get(f"final/{name}"), f"sum/{name}" in tensors
        kind = dtype_name(final) if final is not None else about.gradient_dtype
        found[name] = replace(about, gradient=had, gradient_hash="", gradient_dtype=kind, finite=True)
    writer.event(replace(first, step=step, parameters=found, backwards=len(again), left_out={}))
    writer.tensors(step, tensors)


def _total(terms: list[tuple[Again, float, str]]) -> Tensor | None:
    """The sum of one tensor over backwards; None when one of them had it and it was too large to be recorded."""
    total: Tensor | None = None
    kind = torch.float64
    for one, share, path in terms:
        tensors = one.record.tensors(one.step)
        name = path.split("/", 3 if path.startswith("along/") else 1)[-1]
        if path not in tensors:
            if f"sum/{name}" in tensors:
                return None
            continue
        kind = tensors[path].dtype
        scaled = share * tensors[path].double()
        total = scaled if total is None else total + scaled
    return None if total is None else total.to(kind)


def weights_stayed(candidate: Recording, alone: Recording, again: list[Again]) -> None:
    """Every backward was done with the weights of the first step, and to the same parameters."""
    step = again[0].of
    began = (alone.ranks[0].of(events.Step, 1)[0] if step == 1 else again[0].about).parameters
    frozen = {n for n, about in candidate.ranks[0].of(events.Step, step)[0].parameters.items() if not about.trainable}
    for one in again:
        now = one.about.parameters
        added = {path.partition("/")[2] for path in one.record.group(one.step, "part")}
        learn = sorted((added & frozen) | ({n for n, about in now.items() if not about.trainable} - frozen))
        if learn:
            raise NoReference(
                f"{listed(learn)} learn in some steps and not in others, and data were replayed in one of the others",
                SAME_DATA,
            )
        before = {n: about.before for n, about in began.items()}
        moved = [n for n, about in now.items() if about.trainable and about.before != before.get(n)]
        if moved:
            raise NoReference(
                f"the weights of {listed(moved)} changed while data were replayed: something else than a step of a "
                "torch optimizer without a closure changes them",
                SAME_DATA,
            )


def _limit(one: Again) -> float:
    """What rounding explains of a number that all of a backward's parameters enter."""
    every = one.about.parameters.values()
    return max((tolerances.LIMITS.get(a.gradient_dtype or a.dtype, (0.0, 0.0))[1] for a in every), default=0.0)


def same_beginnings(candidate: Recording, again: list[Again]) -> None:
    """What comes back to the model's output is one device's, but for a factor: so are targets that nobody hashes."""
    for one in again:
        record, ways = candidate.ranks[one.rank], partial(nn.functional.normalize, dim=0, eps=1e-300)
        theirs, ours = ([*map(ways, of)] for of in (_begun(record, one.of, one.micro), _begun(one.record, one.step, 0)))
        limit = max(_limit(one), tolerances.SAME)
        near = [float((a - b).norm()) <= limit for a, b in zip(theirs, ours, strict=False)]
        if not near or not all(near) or len(theirs) != len(ours):
            at = next((e.site for e in record.of(events.Backward, one.of) if e.micro == one.micro), "")
            raise Mixed(
                f"backward at {at} begins otherwise on one device with the data of rank {one.rank}, micro-batch "
                f"{one.micro}: its loss sees what other ranks computed, or labels that are made after the model was "
                "called",
                "make inputs and labels before the model is called, as local variables of the functions around the "
                "call; where the loss joins ranks, record both runs on the same data and use 'verify compare'",
            )


def same_outputs(candidate: Recording, again: list[Again]) -> None:
    """Where ranks exchange something on the way, each has the outputs that one device gives for its rows."""
    own = {rank: n for n, rank in enumerate(distinct(candidate, again[0].of))}
    exchanged = [e for r in candidate.ranks for e in r.of(events.Collective, again[0].of) if e.phase == "forward"]
    if not any(len(own.keys() & set(e.group)) > 1 for e in exchanged):
        return
    for one in again:
        theirs = _begun(candidate.ranks[one.rank], one.of, one.micro, "made")
        ours = _begun(one.record, one.step, 0, "made")
        every = one.about.parameters.values()
        limit = max((tolerances.LIMITS.get(a.dtype, (0.0, 0.0))[1] for a in every), default=0.0)
        for a, b in zip(theirs, ours, strict=False):
            if a[-1] == b[-1] and float((a - b)[:-1].norm()) > max(limit, tolerances.SAME) * float(a[:-1].norm()):
                raise Mixed(
                    f"the model gives other outputs on one device with the data of rank {one.rank}, micro-batch "
                    f"{one.micro}: what it computes there joins the rows of several ranks",
                    SAME_DATA,
                )


def same_losses(candidate: Recording, again: list[Again], limit: float | None = None) -> None:
    """One device, given the rows of all ranks together, computes the loss that the ranks have computed."""
    ranks = distinct(candidate, again[0].of)
    for one in again:
        ours = float(one.record.tensors(one.step)["loss"])
        theirs = [float(candidate.ranks[rank].tensors(one.of)[f"root/{one.micro}"]) for rank in ranks]
        if not same_loss(ours, theirs, limit or _limit(one)):
            raise NoReference(
                f"the loss of micro-batch {one.micro} is {ours:.6g} where one device is given the rows of all ranks, "
                f"and {', '.join(f'{value:.6g}' for value in theirs)} on the ranks",
                SAME_DATA,
            )


def _begun(record: RankRecord, step: int, micro: int, what: str = "begun") -> list[Tensor]:
    found = record.group(step, f"{what}/{micro}")
    return [found[number] for number in sorted(found, key=int)]
