"""Folders that DeepSpeed wrote under ZeRO 1, 2 or 3: weights in fp32, and Adam's two averages, by parameter.

Each rank's file is a zip that holds a pickle (read as data: opcodes.py) and flat tensors. Under ZeRO 1 and 2 a group's
partitions, one after another, are all its parameters; under ZeRO 3 each parameter is cut into equal parts, the last one
filled up. Numbers are checked before they are used; the bytes of one parameter are read at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.errors import CheckpointError
from isograd.integrations.checkpoints.dcp import MOST_ELEMENTS, _dict, _Flat, _numbers, _rebuilt, _Saved, _text, refused
from isograd.integrations.checkpoints.opcodes import PickledObject, RefusedOpcode, brief
from isograd.io.untrusted import read_text

OPTIMIZER = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_mp_rank_(?P<other>\d{1,6})_optim_states\.pt")
TRACKERS = ("latest", "latest_checkpointed_iteration.txt")  # DeepSpeed's and Megatron-LM's
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ZeroTensor:
    """A parameter or buffer: the parts that it consists of, one after another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[_Flat, ...]


class ZeroFolder:
    """A folder that DeepSpeed wrote, opened for reading."""

    def __init__(self, place: str | Path, what: str = "weights") -> None:
        """what: "weights", or one of STATES; of a parameter that is not trained there are no states."""
        self.place = step_of(Path(place))
        self.step = 0  # of the optimizer
        self.options: dict[str, Any] = {}  # of its first group: lr, betas, eps, weight_decay
        with refused(lambda seen: CheckpointError(
            "IG948", f"{self.place} holds no checkpoint of DeepSpeed's ZeRO that can be read", seen=seen,
            expected="zero_pp_rank_*_mp_rank_00_optim_states.pt of all ranks, and the model's states beside them; "
            "nothing in them is executed", fix="copy the folder again; of tp or pp, let DeepSpeed convert it",
        )):  # fmt: skip
            self.tensors = dict(self._found(what))
        self.shapes = {name: held.shape for name, held in self.tensors.items()}

    def full(self, name: str) -> Tensor:
        """A tensor, put together."""
        held = self.tensors[name]
        found = torch.empty(math.prod(held.shape), dtype=held.dtype)
        at = 0
        for piece in held.pieces:
            found[at : at + piece.count] = piece.read()
            at += piece.count
        return found.view(held.shape)

    def _found(self, what: str) -> Iterator[tuple[str, ZeroTensor]]:
        ranks = self._ranks()
        own = [self.place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(ranks))]
        models = [_Saved(path) for path in (own if own[0].exists() else [self.place / "mp_rank_00_model_states.pt"])]
        first = _dict(models[0].value)
        owns = [_dict(_dict(rank.value).get("optimizer_state_dict")) for rank in ranks]
        stage = owns[0].get("zero_stage")
        (stage,) = stage.args if isinstance(stage, PickledObject) and len(stage.args) == 1 else (stage,)
        if stage not in (1, 2, 3) or any(own.get("partition_count") is None for own in owns):
            raise RefusedOpcode(f"no ZeRO stage from 1 to 3: {brief(stage)}")
        shapes = [{_text(n): _numbers(s) for n, s in _pairs(group)} for group in _list(first.get("param_shapes"))]
        flats = [self._flats(rank, own, stage, what) for rank, own in zip(ranks, owns, strict=True)]
        trained = dict(_by_parts(shapes, flats) if stage == 3 else _by_groups(shapes, flats))
        yield from trained.items()
        if what != "weights":
            return
        for name, shape in _pairs(first.get("frozen_param_shapes")):
            parts = [m.flat(dict(_pairs(_dict(m.value).get("frozen_param_fragments"))).get(name)) for m in models]
            yield _text(name), _zero_tensor(_text(name), _numbers(shape), parts if stage == 3 else parts[:1])
        module = dict(_pairs(first.get("module")))
        for name in _list(first.get("buffer_names") or []):
            if name in module:
                flat, shape = models[0].flat(module[name]), _rebuilt(module[name])[3]
                yield _text(name), _zero_tensor(_text(name), shape, [flat])
        for alias, name in _pairs(first.get("shared_params")):
            if name in trained:
                yield _text(alias), trained[name]

    def _ranks(self) -> list[_Saved]:
        """The files of all ranks, in order."""
        files = by_rank(self.place, OPTIMIZER)
        if not files or len(files[0]) > 1:
            raise RefusedOpcode(f"{files[0][1].name}: cut over model-parallel ranks" if files else "no states")
        ranks = [_Saved(path) for (path,) in files]
        counts = _dict(_dict(ranks[0].value).get("optimizer_state_dict")).get("partition_count")
        counts = counts if isinstance(counts, list) else [counts]
        if any(count != len(ranks) for count in counts):
            raise RefusedOpcode(
                f"states of {len(ranks)} ranks, of which there were {', '.join(map(brief, counts[:4]))}"
            )
        return ranks

    def _flats(self, rank: _Saved, own: dict[Any, Any], stage: int, what: str) -> list[_Flat]:
        """This rank's partition of each group."""
        masters = _list(own.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"))
        if what == "weights":
            return [rank.flat(one) for one in masters]
        base = own.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
        groups = base if isinstance(base, list) else []
        if isinstance(base, dict):
            groups = [_dict(base.get("state")).get(i) for i in range(len(masters))]
            self.options = {k: v for k, v in _dict(_list(base.get("param_groups"))[0]).items() if k != "params"}
        step = _dict(groups[0]).get("step", self.options.get("step", 0))
        if isinstance(step, PickledObject):
            step = int(rank.flat(step).cut(0, 1).read()[0])
        self.step = int(step) if isinstance(step, int | float) and 0 <= step < 1 << 48 else 0
        return [rank.flat(_dict(group).get(what)) for group in groups]


def _by_groups(shapes: list[dict[str, tuple[int, ...]]], flats: list[list[_Flat]]) -> Iterator[tuple[str, ZeroTensor]]:
    """ZeRO 1 and 2: a group's partitions, one after another, hold its parameters one after another."""
    for number, group in enumerate(shapes):
        at, parts = 0, [rank[number] for rank in flats]
        for name, shape in group.items():
            count = math.prod(shape)
            yield name, _zero_tensor(name, shape, _between(parts, at, at + count))
            at += count


def _by_parts(shapes: list[dict[str, tuple[int, ...]]], flats: list[list[_Flat]]) -> Iterator[tuple[str, ZeroTensor]]:
    """ZeRO 3: each rank's groups, one after another, hold its part of each parameter."""
    at = 0
    for name, shape in (pair for group in shapes for pair in group.items()):
        count = math.prod(shape)
        each = -(-count // len(flats))
        parts = [part for number, rank in enumerate(flats) if (most := min(each, count - number * each)) > 0
                 for part in _between(rank, at, at + most)]  # fmt: skip
        yield name, _zero_tensor(name, shape, parts)
        at += each


def _between(flats: list[_Flat], start: int, stop: int) -> list[_Flat]:
    """Elements of several tensors, counted through."""
    found, first = [], 0
    for flat in flats:
        a, b = max(start - first, 0), min(stop - first, flat.count)
        if a < b:
            found.append(flat.cut(a, b))
        first += flat.count
    return found


def _zero_tensor(name: str, shape: tuple[int, ...], pieces: list[_Flat]) -> ZeroTensor:
    count = math.prod(shape)
    if not pieces or count > MOST_ELEMENTS:
        raise RefusedOpcode(f"{name[:80]!r}: no parts, or more than {MOST_ELEMENTS:,} elements")
    pieces = _between(pieces, 0, count)
    if sum(piece.count for piece in pieces) != count:
        raise RefusedOpcode(f"{name[:80]!r}: parts that do not fill its shape {shape}")
    return ZeroTensor(shape, pieces[0].dtype if pieces else torch.float32, tuple(pieces))


def step_of(place: Path) -> Path:
    """The folder of the step that DeepSpeed's or Megatron-LM's file beside it names, if there is one."""
    for path in filter(Path.is_file, (place / name for name in TRACKERS)):
        step = read_text(path, 1 << 12).strip()
        step = f"iter_{int(step):07d}" if path.suffix and re.fullmatch("[0-9]{1,15}", step) else step
        return place / step if Path(step).name == step else place
    return place


def by_rank(place: Path, name: re.Pattern[str]) -> list[list[Path]]:
    """Of each `rank` of file names: the files of each `other`, as stages or layers. No file is missing."""
    matches = [(match, path) for path in place.iterdir() if (match := name.fullmatch(path.name))]
    files = {(int(match["rank"] or 0), int(match["other"] or 0)): path for match, path in matches}
    others, ranks = sorted({other for _, other in files}), range(max(files, default=(-1, 0))[0] + 1)
    missing = (f"{rank} (of {other})" for rank in ranks for other in others if (rank, other) not in files)
    if some := list(islice(missing, 4)):
        raise RefusedOpcode(f"no files of the ranks {', '.join(some)}")
    return [[files[rank, other] for other in others] for rank in ranks]


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    """Of a table, a list of pairs, or nothing."""
    if isinstance(value, list):
        yield from ((pair[0], pair[1]) for pair in value if isinstance(pair, list | tuple) and len(pair) == 2)
    elif value is not None and not (isinstance(value, PickledObject) and value.state is None):
        yield from _dict(value).items()


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RefusedOpcode(f"no list where one should be, but {brief(value)}")
    return value
