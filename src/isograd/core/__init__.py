"""The nouns: layout, mesh, contract, weights of losses, counters of a step, random numbers. No torch.distributed."""
