"""torchvision's compiled operators need CUDA's torch; its Python half, which timm and open_clip import, asks for two.

Import this before them. No program of the survey calls these operators.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
