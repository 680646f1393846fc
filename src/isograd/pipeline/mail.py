"""Messages between stages: activations forward, their gradients back, in a fixed order for each pair of ranks.

The schedule says what each rank sends to each other rank and in which order, so messages need no names: the receiver
posts its receives in that order, early enough that they arrive while it computes. Shapes follow from the micro-batch,
which all pp ranks hold: the first message of each kind is preceded by a header that describes it, and both sides
remember it. A gradient has the shape of the activation that was sent forward.

A sent tensor is kept until it has arrived. A message from a neighbour proves that everything which the neighbour needed
to produce it has arrived there. So a rank keeps no more sent tensors than the schedule has micro-batches in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.core.mesh import Mesh
from isograd.errors import PipelineError
from isograd.pipeline.schedule import Action, Schedule

HEADER = 64  # numbers
AHEAD = 2  # receives posted before they are needed, for each neighbour
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class Form:
    """Shapes and dtypes of a stage's output: (shape, dtype, whether it carries a gradient) of each tensor."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Form:
        """The form of these tensors."""
        return cls(tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))

    def gradients(self) -> Form:
        """The form of the gradients that come back for these tensors."""
        return Form(tuple((shape, dtype, False) for shape, dtype, needs in self.tensors if needs))

    def empty(self, device: torch.device) -> list[Tensor]:
        """Memory to receive them into."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in self.tensors]

    def numbers(self) -> list[int]:
        """The form as integers, for a header."""
        found = [len(self.tensors)]
        for shape, dtype, needs in self.tensors:
            found += [DTYPES.index(dtype), int(needs), len(shape), *shape]
        return found

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Form:
        """The form that `numbers` describes; a header may be longer."""
        at, found = 1, []
        for _ in range(numbers[0]):
            dtype, needs, dims = numbers[at : at + 3]
            found.append((tuple(numbers[at + 3 : at + 3 + dims]), DTYPES[dtype], bool(needs)))
            at += 3 + dims
        return cls(tuple(found))


Known = dict[tuple[int, Hashable], Form]  # (stage, shapes of the micro-batch) -> the form of that stage's output


@dataclass
class _Line:
    """The messages of this step between this rank and one other rank."""

    expected: deque[Action]  # whose results the other rank will send, in its order
    posted: dict[Action, tuple[list[Tensor], Handle]] = field(default_factory=dict)
    sending: list[tuple[int, Handle]] = field(
        default_factory=list
    )  # to the other rank, with the place in its order that needs the message


@dataclass(frozen=True)
class P2PGroups:
    """The connections of a pipeline: for each pair of neighbours, a group of two ranks in each direction.

    NCCL runs the messages of a group one after the other, and a message occupies this queue until the other rank has
    posted it, too. In a group of two ranks and one direction both post the same messages in the same order, so no
    message waits for an unrelated one. gloo needs no such groups; it has the same ones, so that one path serves both.
    """

    pipeline: Group  # all ranks of the pipeline: peers are members of it
    outgoing: Mapping[int, Group]  # by peer
    incoming: Mapping[int, Group]

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> P2PGroups:
        """The groups of this rank. Making one blocks until both ranks make it. All ranks go through the pairs in one
        order, so they never wait in a circle; the pairs that begin at even ranks are made at the same time."""
        pipeline, stages = mesh.group("pp"), range(mesh.layout.pp * mesh.layout.vpp)
        pairs = {tuple(sorted((a % pipeline.size, b % pipeline.size))) for a, b in pairwise(stages)}
        outgoing, incoming = dict[int, Group](), dict[int, Group]()
        for low, high in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair[0] % 2, pair[0])):
            if pipeline.index in (low, high):
                peer = low + high - pipeline.index
                up, down = mesh.pair("pp", peer, "up"), mesh.pair("pp", peer, "down")
                outgoing[peer], incoming[peer] = (up, down) if peer == high else (down, up)
        return cls(pipeline, outgoing, incoming)


class Mail:
    """The messages of one step."""

    def __init__(
        self, schedule: Schedule, groups: P2PGroups, device: torch.device, known: Known, shapes: Sequence[Hashable]
    ) -> None:
        self.schedule, self.groups, self.device, self.known, self.shapes = schedule, groups, device, known, shapes
        self.group = groups.pipeline
        self._lines = {peer: _Line(deque(schedule.sent(peer, self.group.index))) for peer in groups.incoming}
        self._returning: dict[tuple[int, int], Form] = {}  # (stage, micro) -> the gradients that will come back for it
        self._places = [{action: place for place, action in enumerate(order)} for order in schedule.orders]

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """The result of `action`, to the rank of the next stage (forward) or of the one before (backward)."""
        ahead = action.kind == "F"
        needing = Action(action.kind, action.stage + (1 if ahead else -1), action.micro)
        if ahead:
            form = Form.of(tensors)
            self._returning[action.stage, action.micro] = form.gradients()
            self._introduce(action, form, needing)
        self._send([t.detach().contiguous() for t in tensors], needing)

    def _send(self, payload: list[Tensor], needing: Action, control: bool = False) -> None:
        peer = self.schedule.rank_of(needing.stage)
        group = self.groups.outgoing[peer]
        handle = raw.send_start(payload, group, 1 - group.index, control=control)
        self._lines[peer].sending.append((self._places[peer][needing], handle))

    def _introduce(self, action: Action, form: Form, needing: Action) -> None:
        """A header before the first message of this kind; afterwards shapes must stay what they were."""
        key = (action.stage, self.shapes[action.micro])
        if key not in self.known:
            strange = [str(dtype) for _, dtype, _ in form.tensors if dtype not in DTYPES]
            if strange or len(form.numbers()) > HEADER:
                seen = f"{len(form.tensors)} tensors, of dtypes {[str(d) for _, d, _ in form.tensors]}"
                known, where = ", ".join(str(d)[6:] for d in DTYPES), f"pp{self.group.index}"
                raise PipelineError("IG802", seen=seen, where=where, stage=action.stage, known=known)
            header = torch.tensor(form.numbers() + [0] * (HEADER - len(form.numbers())), device=self.device)
            self._send([header], needing, control=True)
            self.known[key] = form
        elif self.known[key] != form:
            seen, expected, where = str(form.tensors), str(self.known[key].tensors), f"pp{self.group.index}"
            raise PipelineError("IG803", seen=seen, expected=expected, where=where, stage=action.stage)

    def receive(self, action: Action) -> list[Tensor]:
        """The result of `action`, which a neighbour computes and sends here."""
        peer = self.schedule.rank_of(action.stage)
        line = self._lines[peer]
        while action not in line.posted:
            self._post(line)
        tensors, handle = line.posted.pop(action)
        handle.wait()
        place = self._places[peer][action]  # in its order: to reach it, the neighbour must have received what it needed
        for needed, sent in line.sending:
            if needed <= place:
                sent.wait()
        line.sending = [(needed, sent) for needed, sent in line.sending if needed > place]
        return tensors

    def look_ahead(self) -> None:
        """Post receives that will be needed soon and whose shapes are known."""
        for line in self._lines.values():
            while line.expected and len(line.posted) < AHEAD and self._form(line.expected[0]) is not None:
                self._post(line)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for line in self._lines.values():
            for _, handle in line.sending:
                handle.wait()
            line.sending.clear()

    def drop(self) -> None:
        """Forget messages in flight after an error: they would keep the connections open."""
        self._lines.clear()

    def _form(self, action: Action) -> Form | None:
        if action.kind == "F":
            return self.known.get((action.stage, self.shapes[action.micro]))
        return self._returning.get((action.stage - 1, action.micro))

    def _post(self, line: _Line) -> None:
        action = line.expected.popleft()
        group = self.groups.incoming[self.schedule.rank_of(action.stage)]
        form = self._form(action)
        if form is None:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
            raw.receive_start([header], group, 1 - group.index, control=True).wait()
            form = Form.read(header.tolist())
            self.known[action.stage, self.shapes[action.micro]] = form
        tensors = form.empty(self.device)
        handle = raw.receive_start(tensors, group, 1 - group.index)
        if action.kind == "F":
            for tensor, (_, _, needs) in zip(tensors, form.tensors, strict=True):
                tensor.requires_grad_(needs)
        line.posted[action] = (tensors, handle)
