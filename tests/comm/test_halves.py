"""Memory that waits for fp32 says whether half precision has come instead."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.comm import halves, raw

MARK = torch.tensor([0x7FB12345], dtype=torch.int32)


@pytest.mark.parametrize("half", halves.HALVES)
@pytest.mark.parametrize("shape", [(1,), (2,), (3, 5), (64,)])
def test_what_was_written_into_marked_memory_is_read_in_its_dtype(half: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape)
    for message in (sent, sent.to(half), torch.full(shape, math.nan), torch.full(shape, -math.inf, dtype=half)):
        memory = torch.full(shape, 7.0)
        halves.mark(memory, half)
        raw_bytes = message.reshape(-1).view(torch.uint8)
        memory.view(-1).view(torch.uint8)[: len(raw_bytes)] = raw_bytes
        found = halves.arrived(memory)
        assert found.dtype == message.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), raw_bytes)


def test_memory_that_was_not_marked_is_left_alone() -> None:
    ends_with_the_mark = torch.cat((torch.ones(3), MARK.view(torch.float32)))
    assert halves.arrived(ends_with_the_mark) is ends_with_the_mark
    empty = torch.empty(0)
    halves.mark(empty, torch.bfloat16)
    halves.unmark(empty)
    assert halves.arrived(empty) is empty


def test_a_message_that_ends_with_the_mark_ends_with_another_nan() -> None:
    message = torch.cat((torch.ones(3), MARK.view(torch.float32)))
    halves.unmark(message)
    assert message[:3].tolist() == [1, 1, 1] and math.isnan(message[3])
    memory = torch.empty(4)
    halves.mark(memory, torch.bfloat16)
    memory.copy_(message)
    assert halves.arrived(memory) is memory


def test_no_arithmetic_makes_the_mark() -> None:
    made = MARK.view(torch.float32)
    for result in (made + 0, made * 1, torch.zeros(1).add_(made), made.bfloat16().float() + made):
        memory = result.clone()
        assert int(memory.view(torch.int16)[-1]) != 0x7FB1


def shorter_messages() -> list[tuple[torch.dtype, Tensor]]:
    """Rank 0 sends half precision and rank 1 does not; then the other way round; of one element, and of many."""
    group = ig.Mesh("dp2").group("dp")
    found = []
    for turn in range(2):
        for size in (1, 3, 100_000):
            mine = torch.arange(size, dtype=torch.float32) % 250 + group.index
            mine = mine.bfloat16() if group.index == turn else mine
            memory = [torch.empty(0), torch.empty(0)]
            memory[1 - group.index] = torch.empty(size)
            halves.mark(memory[1 - group.index], torch.bfloat16)
            with raw.recording() as record:
                raw.exchange([[mine]] * 2, [[m] for m in memory], group).wait()
            came = halves.arrived(memory[1 - group.index])
            (message,) = record.entries[0].received[1 - group.index]
            assert (message.dtype, message.numel) == (came.dtype, size)
            found.append((came.dtype, came.float() - (1 - group.index)))
    return found


def test_gloo_takes_a_message_that_is_shorter_than_the_memory_that_waits_for_it(worlds) -> None:
    bf16, fp32 = [torch.bfloat16] * 3, [torch.float32] * 3
    for rank, results in enumerate(worlds(2).run(shorter_messages)):
        assert [dtype for dtype, _ in results] == ([fp32 + bf16, bf16 + fp32][rank])
        for _, values in results:
            assert torch.equal(values, torch.arange(len(values), dtype=torch.float32) % 250)
