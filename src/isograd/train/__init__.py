"""Runs: a config, the loop that trains by it, and what people look at afterwards.

config.py    what a run is, as typed data; reading.py finds the line of every mistake
task.py       what the loop asks of a task: language.py (tokens), pairs.py (pairs of texts), preference.py (answers)
tasks.py      which of them a config asks for
loop.py      the steps: train, evaluate, save, stop
cli/train.py is the command line.
"""
