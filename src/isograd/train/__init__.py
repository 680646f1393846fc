"""Runs: a config, the loop that trains by it, and what people look at afterwards."""
