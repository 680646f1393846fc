"""Small JSON values from every member of a group: names, findings, errors. Used at starts and saves, not in steps."""

from __future__ import annotations

import json
from typing import Any

import torch

from isograd.comm import raw
from isograd.comm.raw import Group


def gather_notes(mine: Any, group: Group, device: torch.device) -> list[Any]:
    """The value `mine` of every member, in rank order."""
    if group.size == 1:
        return [mine]
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    longest = int(torch.stack(raw.gather_list(torch.tensor(len(text), device=device), group)).max())
    padded = torch.cat((text, text.new_full((longest - len(text),), ord(" "))))
    return [json.loads(bytes(other)) for other in torch.stack(raw.gather_list(padded, group)).cpu().numpy()]
