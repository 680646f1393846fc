"""A mesh is asked for sizes and groups in every layer of every step, and is copied with the model that holds it."""

from __future__ import annotations

import copy

import pytest

from isograd.core.layout import Layout
from isograd.core.mesh import Mesh


def test_what_axes_mean_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, axes_asked = Mesh.unbound("dp2 cp2 tp2 sp", rank=5), ["tp", "dp cp", "tp/2", "cp%2", "world"]
    found = [(mesh.ranks(axes), mesh.size(axes), mesh.index(axes), mesh.group(axes).ranks) for axes in axes_asked]
    for axes, (ranks, size, index, group) in zip(axes_asked, found, strict=True):
        assert ranks == group == mesh.layout.ranks(axes, 5)
        assert (size, index) == (len(ranks), ranks.index(5))
    monkeypatch.setattr(Layout, "ranks", None)
    again = [(mesh.ranks(axes), mesh.size(axes), mesh.index(axes), mesh.group(axes).ranks) for axes in axes_asked]
    assert again == found


def test_a_mesh_is_copied_as_itself() -> None:
    mesh = Mesh.unbound("tp2")
    assert copy.deepcopy([mesh])[0] is mesh
    assert copy.copy(mesh) is mesh
