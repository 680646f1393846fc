"""How near do right gradients in half precision come to the limits for one factor of a kind of parameter?

    python -m benchmarks.verify_kinds --seeds 40            seconds each

A deep, narrow net in bf16 on one process. Its gradient is computed in ten associations, for the noise, and in others,
which are right programs in another order of additions. Each kind of parameter with at least 16 tensors is judged as
`isograd verify` judges it: beside the fp64 truth with the measured noise, and beside one of the runs without (two
recordings). `--plant P`: the same with one kind P too large, which must be found.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.prove.prove import ASSOCIATIONS
from isograd_verify.compare.classes import Fitted, fitted, mean_of, shifts
from isograd_verify.compare.numerics import Associated

OUT = Path(__file__).parent / "out"
OTHERS = ((4, 1), (4, 2), (4, 3), (4, 4), (4, 5), (4, 6))  # a layout: pieces of the batch, terms of each product
DEPTH, WIDTH, ROWS = 20, 16, 24
KINDS = ("norm.weight", "up.weight", "down.bias", "down.weight")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def gradients(net: Net, tokens: Tensor, labels: Tensor, pieces: int, terms: int) -> dict[str, Tensor]:
    """Sums of `pieces` micro-batches, every product split into `terms`."""
    net.zero_grad()
    with Associated(terms) if terms > 1 else nullcontext():
        for x, y in zip(tokens.tensor_split(pieces), labels.tensor_split(pieces), strict=True):
            (F.cross_entropy(net(x), y, reduction="sum") / len(labels)).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def judged(seed: int, plant: float, found: Counter[str], ratios: dict[str, list[float]]) -> None:
    torch.manual_seed(seed)
    net = Net().bfloat16()
    for parameter in net.parameters():
        with torch.no_grad():
            parameter.mul_(1 + torch.rand(())).add_(0.1 * torch.randn_like(parameter))
    tokens, labels = torch.randint(50, (ROWS,)), torch.randint(50, (ROWS,))
    members = [gradients(net, tokens, labels, *association) for association in ASSOCIATIONS]
    others = [gradients(net, tokens, labels, *association) for association in OTHERS]
    truth = gradients(net.double(), tokens, labels, 1, 1)
    runs = tuple({name: fitted([run[name]], [whole])[0] for name, whole in truth.items()} for run in members)
    eps = torch.finfo(torch.bfloat16).eps
    planted = KINDS[seed % len(KINDS)]
    wrong = [
        {n: (g.float() * (1 + plant)).bfloat16() if n.endswith(planted) else g for n, g in run.items()}
        for run in others
    ]
    proof = mean_of([fit(run, truth) for run in wrong])
    told = {"proof": shifts(proof, eps, runs)}
    told |= {f"recordings {i}": shifts(fit(run, members[seed % len(members)]), eps) for i, run in enumerate(wrong)}
    for mode, judgements in told.items():
        for one in judgements:
            which = f"{mode.split()[0]}{', planted' if plant and one.kind.endswith(planted) else ''}"
            found[f"{which}: {one.verdict}"] += 1
            ratios.setdefault(which, []).append(one.ratio)


def fit(run: dict[str, Tensor], reference: dict[str, Tensor]) -> Fitted:
    return {name: fitted([gradient], [reference[name]]) for name, gradient in run.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--plant", type=float, default=0.0, metavar="P")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    ratios: dict[str, list[float]] = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        judged(seed, options.plant, found, ratios)
    print(dict(sorted(found.items())))
    for which, values in sorted(ratios.items()):
        ordered = torch.tensor(sorted(values), dtype=torch.float64)
        spread = [float(ordered.quantile(q)) for q in (0.0, 0.5, 0.99, 0.999, 1.0)]
        print(f"{which}: {len(values)}; least, median, 99 %, 99.9 %, largest: {', '.join(f'{v:.2f}' for v in spread)}")
    OUT.mkdir(exist_ok=True)
    (OUT / "verify_kinds.json").write_text(json.dumps(ratios))


if __name__ == "__main__":
    main()
