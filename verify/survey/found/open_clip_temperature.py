"""open_clip: the temperature's gradient grows with accumulation, and with ranks where the encoders' does not.

    torchrun --nproc-per-node 1 open_clip_temperature.py 2
    torchrun --nproc-per-node 2 open_clip_temperature.py

Eight pairs, divided among ranks and micro-batches; one loss over all of them is what every run should follow. With
accumulation train_one_epoch computes that loss once per micro-batch, each time with the gradient of the micro-batch's
own features, but of the whole temperature. With the default loss each of two ranks adds the gradient of its own
features, and of the whole temperature, and DistributedDataParallel halves both.
"""

import sys
from argparse import Namespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

names = torch.library.Library("torchvision", "DEF")  # where torchvision's compiled operators need CUDA's torch
for name in ("nms", "qnms"):
    names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from open_clip import CLIP, ClipLoss  # noqa: E402
from open_clip_train.train import train_one_epoch  # noqa: E402

dist.init_process_group("gloo")
rank, world, micro = dist.get_rank(), dist.get_world_size(), int(sys.argv[1]) if len(sys.argv) > 1 else 1
torch.manual_seed(0)
vision = {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
model = CLIP(16, vision, text, output_dict=True)
images, texts = torch.randn(8, 3, 16, 16), torch.randint(64, (8, 8))
made = model(images, texts)
logits, own = made["logit_scale"] * made["image_features"] @ made["text_features"].T, torch.arange(8)
((F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2).backward()
wanted = {n: p.grad.clone() for n, p in model.named_parameters()}


class Data:
    dataloader = property(lambda self: self)
    num_batches, num_samples = micro, 8

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        parts = zip(images.chunk(world)[rank].chunk(micro), texts.chunk(world)[rank].chunk(micro), strict=True)
        return iter(list(parts))


how = Namespace(
    device="cpu", precision="fp32", distill=False, accum_freq=micro, skip_scheduler=True, horovod=False, rank=rank,
    grad_clip_norm=None, world_size=world, log_every_n_steps=9, batch_size=8, wandb=False, local_rank=rank,
)  # fmt: skip
loss, optimizer = ClipLoss(rank=rank, world_size=world), torch.optim.SGD(model.parameters(), lr=0.0)
train_one_epoch(DistributedDataParallel(model), {"train": Data()}, loss, 0, optimizer, None, None, None, how)
for name, parameter in model.named_parameters() if rank == 0 else []:
    if name in ("logit_scale", "visual.proj", "token_embedding.weight"):
        right = wanted[name]
        print(f"{float((parameter.grad * right).sum() / right.square().sum()):.2f} times what it should be: {name}")
dist.destroy_process_group()
