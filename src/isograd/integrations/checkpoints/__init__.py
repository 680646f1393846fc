"""Checkpoints of other trainers, read without unpickling code."""
