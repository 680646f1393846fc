"""Runs: a config, the loop that trains by it, and what people look at afterwards.

config.py    what a run is, as typed data; reading.py finds the line of every mistake
job.py       what the loop asks of a task: language.py (tokens), pairs.py (pairs of texts)
loop.py      the steps: train, evaluate, save, stop
command.py   isograd train, compare and config
"""
