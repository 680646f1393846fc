"""A recording beside a reference: shards are placed, gradients compared, differences diagnosed."""
