"""Mesh: a Layout bound to a running world: this rank's place on each axis, and the ranks that share an axis with it.

A mesh is passed as an argument, never looked up. A process group is made at its first use, by its members only; every
rank makes groups in the same order because every rank runs the same program.

    rank order, dp2 tp2 pp2 (pp outermost, then dp, cp, tp innermost, so that tp neighbours sit on one machine):

              tp0  tp1                 tp0  tp1
        dp0    0    1            dp0    4    5
        dp1    2    3            dp1    6    7
            pp0                      pp1
"""

from __future__ import annotations

import torch

from isograd.comm import fake
from isograd.comm import world as comm_world
from isograd.comm.device import Asked
from isograd.comm.group import Group
from isograd.core.layout import DATA as DATA  # noqa: PLC0414 (told from here, too)
from isograd.core.layout import Layout
from isograd.errors import LayoutError

EXPERT_DATA = "edp"  # those of routed experts
STAGE = "dp cp tp"  # all ranks of a pipeline stage: each data axes, and the axis beside it


class Mesh:
    """One rank's view of a layout: sizes, indices and process groups along any axes."""

    def __init__(self, layout: Layout | str, device: Asked = None) -> None:
        """Join the running world: the one already initialised, else torchrun's, else a world of one.

        device: "cpu" computes on the CPU on purpose; None: each rank on a card of its own, where the machine has any.
        """
        layout = layout if isinstance(layout, Layout) else Layout.parse(str(layout))
        rank, size = comm_world.world(device)
        if size != layout.world_size:
            fits = "; ".join(str(fit) for fit in layout.fits(size))
            raise LayoutError("IG110", layout=str(layout), needed=layout.world_size, size=size, fits=fits)
        self._setup(layout, rank, bound=True)
        if device is not None:
            self.device = torch.device(device)

    @classmethod
    def unbound(cls, layout: Layout | str, rank: int = 0) -> Mesh:
        """The mesh that one rank would have, without a world: to build and inspect models and contracts."""
        mesh = cls.__new__(cls)
        mesh._setup(Layout.parse(layout) if isinstance(layout, str) else layout, rank, bound=False)
        return mesh

    @classmethod
    def imagine(cls, layout: Layout | str, rank: int = 0, world: fake.FakeWorld | None = None) -> Mesh:
        """One rank of a world without processes, of any size: programs run on it unchanged, and messages go nowhere.

        Data that would arrive are zeros; where ranks compare or count something, all others agree with this one.
        `comm.record.recording` shows what is sent. world: a `fake.FakeWorld`, the same for ranks of different pipeline
        stages: its `run` runs them together, so that each hears what the others say.
        """
        mesh = cls.unbound(layout, rank)
        of_stage = mesh.layout.world_size // mesh.layout.pp
        mesh._member = fake.FakeRank(world or fake.FakeWorld(), rank, of_stage)
        mesh.bound = True
        return mesh

    def _setup(self, layout: Layout, rank: int, *, bound: bool) -> None:
        self._member: fake.FakeRank | None = None
        self.layout = layout
        self.rank = rank
        self.bound = bound
        self.coordinates = layout.coordinates(rank)
        self.device = comm_world.device() if bound else torch.device("cpu")
        self._groups: dict[tuple[str, tuple[int, ...], str], Group] = {}
        self._ranks: dict[tuple[str, int], tuple[int, ...]] = {}  # what axes mean is read once
        self._all_groups: dict[str, torch.Tensor] = {}

    def size(self, axes: str) -> int:
        """The number of ranks in this rank's group along `axes`."""
        return len(self.ranks(axes))

    def ranks(self, axes: str, rank: int | None = None) -> tuple[int, ...]:
        """The global ranks, in order, of the group of this rank (or another) along `axes` ('tp', 'dp cp', 'tp/2', ...:
        Layout.ranks)."""
        key = axes, self.rank if rank is None else rank
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = self.layout.ranks(*key)
        return found

    def index(self, axes: str) -> int:
        """This rank's position in its group along `axes`."""
        return self.ranks(axes).index(self.rank)

    def all_groups(self, axes: str) -> torch.Tensor:
        """The ranks of all groups along `axes`, a row for each: to compare what the ranks of a group have said."""
        if axes not in self._all_groups:
            self._all_groups[axes] = torch.tensor(self.layout.groups(axes))
        return self._all_groups[axes]

    def group(self, axes: str, purpose: str = "") -> Group:
        """This rank's process group along `axes`. Groups of different purposes have connections of their own."""
        return self._group(axes, self.ranks(axes), purpose)

    @property
    def on_cards(self) -> bool:
        """Whether kernels communicate (NCCL): the host runs ahead of them."""
        return self.device.type == "cuda"

    @property
    def layers_wait(self) -> bool:
        """Whether layers of one rank wait for others: under tp, cp, ep, pp; on cards, where the gathers of ZeRO 3 are
        not checked by messages, there too."""
        beside = self.layout.dp < self.layout.world_size or self.size("ep") > 1
        return beside or (self.layout.zero == 3 and self.layout.dp > 1 and self.on_cards)

    def host_group(self, axes: str) -> Group:
        """The same for values in host memory: a group of gloo beside NCCL's; where all is gloo, the group itself."""
        return self.group(axes, "host" if self.on_cards else "")

    def pair(self, axes: str, peer: int, purpose: str) -> Group:
        """The process group of this rank and member `peer` of its group along `axes`, for messages between the two."""
        ranks = self.ranks(axes)
        return self._group(axes, tuple(ranks[i] for i in sorted((self.index(axes), peer))), purpose)

    def _group(self, axes: str, ranks: tuple[int, ...], purpose: str) -> Group:
        key = axes, ranks, purpose
        if key not in self._groups:
            if self.bound:
                self._groups[key] = comm_world.new_group(axes, ranks, self.rank, purpose, self._member)
            else:
                self._groups[key] = Group(axes, ranks, ranks.index(self.rank))
        return self._groups[key]

    def describe_rank(self) -> str:
        """This rank in words for error messages, as in 'rank 3 (dp1 tp1)' or 'rank 5 (dp5 ep1)'."""
        spots = " ".join(f"{axis}{i}" for axis, i in self.coordinates.items() if self.layout.size(axis) > 1)
        spots += f" ep{self.index('ep')}" if self.layout.ep > 1 else ""
        return f"rank {self.rank}" + (f" ({spots})" if spots else "")

    def __deepcopy__(self, memo: object) -> Mesh:
        """Return this mesh: a copied model belongs to the same world."""
        return self

    def __copy__(self) -> Mesh:
        return self

    def __getstate__(self) -> dict[str, object]:
        if self.bound and self.layout.world_size > 1:
            raise LayoutError(
                "IG111", seen=f"pickle or torch.save of an object that holds {self!r}", where=self.describe_rank()
            )
        return vars(self)

    def __repr__(self) -> str:
        return f"Mesh({str(self.layout)!r}, {self.describe_rank()}{'' if self.bound else ', unbound'})"
