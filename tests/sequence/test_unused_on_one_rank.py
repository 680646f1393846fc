"""Under cp, ranks reach parameters at different points of backward, or not at all: buckets and attention's exchanges
are under way at the same time, and neither may wait for the other or take its place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine
from isograd.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab=31, hidden=16, layers=3, heads=4, head_dim=4, mlp=20)


class Branchy(nn.Module):
    """A decoder whose second block has one more map, which only some ranks of a cp group apply to their tokens."""

    def __init__(self, mesh: Mesh, applies: bool) -> None:
        super().__init__()
        self.decoder = Transformer(CONFIG, mesh, dtype=torch.float64)
        torch.manual_seed(0)
        self.extra = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(3))
        if applies:
            self.decoder.blocks[1].register_forward_hook(self._add)

    def _add(self, _: nn.Module, __: object, x: Tensor) -> Tensor:
        for extra in self.extra:
            x = x + torch.tanh(extra(x))
        return x

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(tokens, labels)  # type: ignore[no-any-return]


def gradients(layout: str, bucket_mb: float, overlap: bool) -> dict[str, Tensor]:
    mesh = Mesh(layout)
    model = Branchy(mesh, applies=mesh.index("cp") == 0)
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_mb=bucket_mb, overlap=overlap)
    source = torch.Generator().manual_seed(mesh.index("dp"))
    for _ in range(2):
        tokens = torch.randint(31, (2, 13), generator=source)
        engine.backward(*model(tokens, tokens.roll(-1, 1)))
    found = {name: gradient.clone() for name, gradient in engine.grads().items()}
    engine.step()
    assert mesh.size(DATA) > 1
    return found


def many_buckets(layout: str) -> None:
    truth = gradients(layout, 16.0, overlap=False)
    assert float(truth["extra.0.weight"].norm()) > 0
    for name, found in gradients(layout, 1e-3, overlap=True).items():
        error = float((found - truth[name]).norm())
        assert error <= 1e-12 * float(truth[name].norm()), f"{layout}: {name}: error {error:.1e}"


@pytest.mark.parametrize("layout", ["cp2 ulysses", "cp2 ring", "dp2 cp2 ulysses zero1", "dp2 cp2 ring zero2"])
def test_a_parameter_that_one_cp_rank_leaves_out_stops_nobody(worlds, layout: str) -> None:
    """A16: SIGABRT under cp2 (2048 bytes received for 768), deadlock under dp2 cp2."""
    worlds(4 if "dp2" in layout else 2).run(partial(many_buckets, layout), timeout=60)
