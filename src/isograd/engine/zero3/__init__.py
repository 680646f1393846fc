"""ZeRO stage 3: parameters are row shards, and unsharded only while a block computes with them."""
