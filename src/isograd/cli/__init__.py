"""The command line: main and one file for each command."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

LAZY_COMMANDS = {  # command: the file that has it, a function of the same name or `main`, and what its help says
    "train": ("train", "train by a config: see 'isograd train --help'"),
    "rehearse": ("rehearse", "simulate one step on any number of ranks, and check what they send"),
    "plan": ("plan", "find the best layouts of a config on many devices: memory, time, checkpoints"),
    "machine": ("plan", "the devices that 'isograd plan' knows; measure this computer"),
    "compare": ("train", "train under several layouts and compare losses, speed, memory, bytes"),
    "config": ("train", "show a config's values and their origins, or the schema; convert other programs' configs"),
    "data": ("data", "build token shards from text; inspect and verify them: see 'isograd data --help'"),
    "ckpt": ("checkpoint", "inspect, verify, diff and convert checkpoints: see 'isograd ckpt --help'"),
    "generate": ("generate", "what a trained model writes after a prompt: see 'isograd generate --help'"),
    "chat": ("generate", "a conversation with a trained model: see 'isograd chat --help'"),
    "evaluate": ("evaluate", "a model's perplexity on files, and tasks of lm-eval-harness"),
    "check": ("network", "check the network between a run's machines: see 'isograd check --help'"),
}


def main_of(command: str) -> Callable[[list[str]], int]:
    """The command line of a command that has its own, loaded when it is asked for."""
    file = import_module(f"isograd.cli.{LAZY_COMMANDS[command][0]}")
    found: Callable[[list[str]], int] = getattr(file, command, None) or file.main
    return found
