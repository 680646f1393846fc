"""What a run will do, found by running its program on simulated ranks."""
