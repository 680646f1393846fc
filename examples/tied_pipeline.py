"""Megatron-LM #844, replayed: dp2 pp2, a tied embedding and a sharded optimizer, wrong and right, on 4 local ranks.

    python examples/tied_pipeline.py

A tied weight has a copy on the first and on the last stage; its gradient is the sum over both uses and both data ranks:
four contributions, each with coefficient 1. A sharded optimizer lets one data rank own a part of it. Megatron scattered
the sums over the data ranks first, in place, and summed the tie afterwards. But the weight was at the front of one
stage's buffer and at the end of the other's, so its two copies had different owners. Each owner received what the
reduce-scatter had left on a rank that did not own the weight: one contribution missing, another one counted twice.

Here this is run in plain torch.distributed, then by isograd's engine on the same model and data. For
each rank the coefficients of the four contributions in its gradient are printed, found by regression.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import isograd as ig

VOCAB, HIDDEN, LENGTH = 16, 8, 6
LAYOUT = "dp2 pp2 zero1"


class Front(nn.Module):
    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.weight = tied
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.mix(F.embedding(tokens, self.weight)))


class Back(nn.Module):
    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.weight = tied

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    tied = nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=torch.float64))
    return [module.double() for module in (Front(tied), Back(tied))]


def batch(dp: int) -> tuple[Tensor, Tensor]:
    """Uneven: data rank 0 has 2 sequences, data rank 1 has 3."""
    window = torch.randint(VOCAB, (2 + dp, LENGTH + 1), generator=torch.Generator().manual_seed(dp))
    return window[:, :-1], window[:, 1:]


def loss_of(logits: Tensor, micro: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), micro[1].flatten()), micro[1].numel()


def contributions() -> dict[tuple[str, int], Tensor]:
    """(use, data rank) -> what it adds to the gradient of the mean loss. One device, each use by itself."""
    count = sum(batch(dp)[1].numel() for dp in range(2))
    found = {}
    for dp in range(2):
        front, back = stages()
        back.weight = nn.Parameter(front.weight.detach().clone())  # apart, so that each use has a gradient of its own
        mean, weight = loss_of(back(front(batch(dp)[0])), batch(dp))
        (mean * weight / count).backward()
        found["embedding", dp], found["head", dp] = front.weight.grad, back.weight.grad
    return found


def fit(observed: Tensor) -> str:
    """How often each contribution is in a gradient: data rank 0's embedding and head, data rank 1's."""
    found = contributions()
    basis = torch.stack([found[use, dp].flatten() for dp in range(2) for use in ("embedding", "head")], 1)
    solved = torch.linalg.lstsq(basis, observed.flatten()[:, None])
    residual = float((basis @ solved.solution - observed.flatten()[:, None]).norm() / observed.norm())
    assert residual < 1e-9, "a gradient that is no sum of the contributions"
    return "  ".join(f"{abs(round(float(c), 6)):g}" for c in solved.solution)


def plain_backward(stage: int, dp: int) -> nn.Module:
    """One micro-batch through two stages, without an engine. Their gradients, averaged over data ranks, are right."""
    rank, micro = dist.get_rank(), batch(dp)
    share = 2 * micro[1].numel() / sum(batch(d)[1].numel() for d in range(2))
    front, back = stages()
    if stage == 0:
        x = front(micro[0])
        dist.send(x.detach(), rank + 2)
        gradient = torch.empty_like(x)
        dist.recv(gradient, rank + 2)
        x.backward(gradient)
        return front
    x = torch.empty(*micro[0].shape, HIDDEN, dtype=torch.float64)
    dist.recv(x, rank - 2)
    x.requires_grad_()
    (loss_of(back(x), micro)[0] * share).backward()
    dist.send(x.grad, rank - 2)
    return back


def scattered_first() -> list[str]:
    """The wrong order: what this rank holds of the tied weight's gradient before and after each of the two sums."""
    stage, dp = divmod(dist.get_rank(), 2)  # ranks 0, 1: first stage; 2, 3: last stage
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    data, tie = groups[stage], groups[2 + dp]
    model = plain_backward(stage, dp)
    tied = model.weight.grad.flatten()
    others = torch.cat([p.grad.flatten() for p in model.parameters() if p is not model.weight])
    others = F.pad(others, (0, len(tied) - len(others)))  # so that each half of a buffer is one data rank's
    buffer = torch.cat((others, tied) if stage == 0 else (tied, others))
    here = buffer[len(tied) :] if stage == 0 else buffer[: len(tied)]  # a view
    story = [fit(here)]
    mean = buffer.clone()
    dist.all_reduce(mean, group=data)
    mine = slice(dp * len(tied), (dp + 1) * len(tied))
    buffer[mine] = mean[mine] / 2  # a reduce-scatter in place: the other half keeps what was in it
    story.append(fit(here))
    dist.all_reduce(here, group=tie)
    story.append(fit(here))
    owner = dp == 1 - stage
    return [*story, "yes" if owner else "no"]


def by_isograd() -> str:
    """What isograd's optimizers step this rank's copy with: a step of plain SGD with lr 1 shows it."""
    mesh = ig.Mesh(LAYOUT)
    model = ig.pipeline.Stages(stages(), mesh, loss=loss_of)
    tied = model.get_parameter("kept.0.weight")
    before = tied.detach().clone()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=1.0))
    engine.train_step(batch(mesh.index("dp")))
    return fit(before - tied.detach())


def both() -> tuple[list[str], str]:
    return scattered_first(), by_isograd()


def main() -> None:
    results = ig.launch(both, 4, timeout=120)
    print("Coefficients of the contributions to the tied weight's gradient, as data rank 0's embedding, head,")
    print("data rank 1's embedding, head. Losses are scaled by 2, for the mean over two data ranks that is to come.")
    print("Right is 1  1  1  1 wherever an optimizer steps.\n")
    row = "{:<21}{:<14}{:<16}{:<14}{:<7}{}"
    print(row.format("", "own backward", "reduce-scatter", "then the tie", "steps", "isograd"))
    for rank, (story, ours) in enumerate(results):
        name = f"rank {rank}: stage {rank // 2}, dp{rank % 2}"
        print(row.format(name, *story, ours).rstrip())
    wrong = [story[2] for story, _ in results if story[3] == "yes"]
    assert wrong == ["1  0  1  2", "2  1  0  1"]
    assert all(ours == "1  1  1  1" for _, ours in results)
    print(
        "\nThe optimizers that step would use 1  0  1  2 on the first stage and 2  1  0  1 on the last one: wrong, and"
    )
    print(
        "unlike each other, so the two copies of one weight drift apart. isograd cuts both copies by the weight's name."
    )


if __name__ == "__main__":
    main()
