"""open_clip's own training loop (open_clip_train.train.train_one_epoch) on a tiny CLIP under DDP, with its losses."""

from argparse import Namespace

import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision_names
from open_clip import CLIP, ClipLoss
from open_clip.loss import SigLipLoss
from open_clip_train.train import train_one_epoch
from torch.nn.parallel import DistributedDataParallel

assert torchvision_names.library
IMPLEMENTATIONS = ("bidir", "shift", "reduce", "gather")
SWITCHES = ("local-loss", "gather-with-grad", "siglip", *IMPLEMENTATIONS)
ROWS = 4


def plain(args):
    torch.manual_seed(0)
    return CLIP(
        embed_dim=16, vision_cfg={"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        text_cfg={"context_length": 8, "vocab_size": tiny.VOCAB, "width": 32, "heads": 2, "layers": 2},
        init_logit_bias=-10.0 if args.siglip else None, output_dict=True,
    )  # fmt: skip


def batch(rank, world, micro, args):
    generator = torch.Generator().manual_seed(micro * world + rank)
    return torch.randn(ROWS, 3, 16, 16, generator=generator), torch.randint(tiny.VOCAB, (ROWS, 8), generator=generator)


def whole(model, batches, args):
    """One loss over the pairs of all ranks and micro-batches."""
    made = model(*(torch.cat(part) for part in zip(*batches, strict=True)))
    logits = made["logit_scale"] * made["image_features"] @ made["text_features"].T
    if args.siglip:
        signs = 2 * torch.eye(len(logits)) - 1
        return -F.logsigmoid(signs * (logits + made["logit_bias"])).sum() / len(logits)
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Data:
    """What train_one_epoch asks of its data."""

    def __init__(self, rank, world, args):
        self.num_batches = args.steps * args.accumulate
        self.num_samples = self.num_batches * ROWS * world
        self.batches = [batch(rank, world, i, args) for i in range(self.num_batches)]
        self.dataloader = self

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        return iter(self.batches)


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(plain(args))
    if args.siglip:
        chosen = next((i for i in IMPLEMENTATIONS if getattr(args, i)), None)
        loss = SigLipLoss(rank=rank, world_size=world, dist_impl=chosen)
    else:
        loss = ClipLoss(args.local_loss, args.gather_with_grad, cache_labels=True, rank=rank, world_size=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    how = Namespace(
        device="cpu", precision="fp32", distill=False, accum_freq=args.accumulate, skip_scheduler=True, horovod=False,
        grad_clip_norm=None, rank=rank, local_rank=rank, world_size=world, log_every_n_steps=100, batch_size=ROWS,
        local_batch_size=ROWS, save_logs=False, wandb=False,
    )  # fmt: skip
    train_one_epoch(model, {"train": Data(rank, world, args)}, loss, 0, optimizer, None, None, None, how)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
