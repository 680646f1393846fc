"""Communication: raw.py calls torch.distributed, ops.py makes it differentiable, launch.py starts local ranks."""
