"""Communication: world.py and transport.py call torch.distributed; ops.py is differentiable."""
