"""timm's pieces in the order of its training script: model, optimizer, DDP, accumulation without reduction, clip."""

from contextlib import nullcontext

import tiny
import torch
import torch.distributed as dist
import torchvision_names
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, clip_grad, dispatch_clip_grad, distribute_bn
from torch.nn.parallel import DistributedDataParallel

assert torchvision_names.library
BEFORE = (clip_grad, "adaptive_clip_grad", lambda parameters: True)
SWITCHES = ("resnet", "soft", "agc")
CLASSES, ROWS = 10, 4


def plain(args):
    torch.manual_seed(0)
    if args.resnet:
        return create_model("resnet10t", num_classes=CLASSES)
    return create_model(
        "vit_tiny_patch16_224", num_classes=CLASSES, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2
    )


def batch(rank, world, micro, args):
    generator = torch.Generator().manual_seed(micro * world + rank)
    images = torch.randn(ROWS, 3, 32, 32, generator=generator)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    return images, torch.eye(CLASSES)[labels] * 0.8 + 0.02 if args.soft else labels


def truth(model, batch):
    images, labels = batch
    logs = model(images).log_softmax(1)
    wanted = labels if labels.ndim == 2 else torch.eye(CLASSES)[labels] * 0.9 + 0.1 / CLASSES
    return -(wanted * logs).sum(), len(images)


def main():
    args = tiny.options(*SWITCHES)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = plain(args)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    average = ModelEmaV3(model, decay=0.99)
    model = DistributedDataParallel(model, broadcast_buffers=False)
    loss_of = SoftTargetCrossEntropy() if args.soft else LabelSmoothingCrossEntropy(smoothing=0.1)
    model.train()
    for step in range(args.steps):
        for i in range(args.accumulate):
            images, labels = batch(rank, world, step * args.accumulate + i, args)
            last = i == args.accumulate - 1
            with nullcontext() if last else model.no_sync():
                loss = loss_of(model(images), labels) / args.accumulate
                loss.backward()
        dispatch_clip_grad(model.parameters(), value=0.01 if args.agc else 1.0, mode="agc" if args.agc else "norm")
        optimizer.step()
        average.update(model.module, step=step)
        optimizer.zero_grad()
    distribute_bn(model, world, reduce=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
