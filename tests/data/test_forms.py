"""Lines of ShareGPT and Alpaca are read as the messages that they stand for."""

import json

import pytest

from isograd.data.chats import conversation
from isograd.errors import IsogradError

ASKED, ANSWERED = {"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}
TURNS = [{"from": "human", "value": "Add.\n\n1 2"}, {"from": "gpt", "value": "3"}]


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": TURNS, "id": "7"},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Add.\n\n1 2", "input": "", "output": "3", "system": None},
    ],
)
def test_forms_are_the_same_messages(line):
    assert conversation(json.dumps(line)) == ([ASKED, ANSWERED], None)


@pytest.mark.parametrize("line", [{"conversations": TURNS, "system": "s"},
                                  {"instruction": "Add.", "input": "1 2", "output": "3", "system": "s"}])  # fmt: skip
def test_a_system_text_comes_first(line):
    assert conversation(json.dumps(line))[0] == [{"role": "system", "content": "s"}, ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"conversations": [{"from": "tool_bot", "value": "x"}]}, "tool_bot"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "turn 1"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 1"),
        ({"instruction": "Add.", "output": " "}, "an empty 'output'"),
        ({"instruction": "Add.", "output": 3}, "'output' is int"),
        ({"instruction": "Add.", "output": "3", "history": [["a", "b"]]}, "history"),
    ],
)
def test_what_is_no_message_is_refused(line, said):
    with pytest.raises(IsogradError, match="IG990") as error:
        conversation(json.dumps(line))
    assert said in str(error.value)
