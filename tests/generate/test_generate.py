"""What a model writes: against a loop without a cache, from every kind of folder, by the command line."""

from __future__ import annotations

import datetime
import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isograd.cli.main import main
from isograd.core import rng
from isograd.errors import CheckpointError, ConfigError
from isograd.generate import Sampling, Writer, draw, open_writer
from isograd.generate import writer as writing
from isograd.generate.text_stream import TextStream

WORDS = ["<|end|>", "<|user|>", "<|answer|>", "hello", "world", "how", "are", "you", "?", "!"]
TEMPLATE = "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'answer' }}|> {{ m.content }} {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|answer|>{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer of ten words and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=40, eos_token_id=0, bos_token_id=None, **shape)
    model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that it prefers some words
    model.save_pretrained(place)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="!"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    special = {"additional_special_tokens": WORDS[1:3], "eos_token": WORDS[0]}
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **special).save_pretrained(place)
    return place


def without_cache(writer: Writer, prompt: Sequence[int], how: Sampling, sample: int) -> list[int]:
    """A naive loop: the whole text again for each token, in the order of the vocabulary."""
    ids, key = list(prompt), rng.key(how.seed, "generate", sample)
    for place in range(how.max_new_tokens):
        with torch.no_grad():
            logits = writer.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        if how.temperature == 0:
            token = int(logits.argmax())
        else:
            chances = torch.softmax(logits.double() / how.temperature, -1)
            kept = sorted(range(len(chances)), key=lambda t: (-float(chances[t]), t))[: how.top_k or None]
            total, nucleus = 0.0, []
            share = sum(float(chances[t]) for t in kept)
            for t in kept:
                if total >= how.top_p * share:
                    break
                nucleus.append(t)
                total += float(chances[t])
            point, seen = float(rng.uniform(key, torch.tensor([place]))) * total, 0.0
            token = nucleus[-1]
            for t in nucleus:
                seen += float(chances[t])
                if point <= seen:
                    token = t
                    break
        if token in writer.ends:
            break
        ids.append(token)
    return ids[len(prompt) :]


@pytest.mark.medium
@pytest.mark.parametrize(
    "how",
    [
        Sampling(20, 0.0),
        Sampling(20, 1.0),
        Sampling(20, 1.3, top_k=4, seed=5),
        Sampling(20, 0.9, top_p=0.7),
        Sampling(20, 1.0, top_k=5, top_p=0.8),
    ],
)
def test_a_cache_changes_no_token(folder: Path, how: Sampling) -> None:
    writer = open_writer(folder)
    for sample in range(4):
        for prompt in ([3], [1, 3, 4, 5, 2]):
            assert list(writer.tokens(prompt, how, sample)) == without_cache(writer, prompt, how, sample)


def test_draws_have_the_chances_that_softmax_says() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    counts = torch.zeros(4)
    for place in range(4000):
        counts[draw(logits, rng.key(1, "generate", 0), place, Sampling(temperature=2.0))] += 1
    chances = torch.softmax(logits / 2.0, -1)
    assert float((counts / 4000 - chances).abs().max()) < 4 * (0.25 / 4000) ** 0.5


def test_other_samples_and_seeds_write_other_texts_and_the_same_ones_the_same(folder: Path) -> None:
    writer = open_writer(folder)
    texts = [tuple(writer.tokens([3], Sampling(30, 1.5, seed=seed), n)) for seed in (0, 1) for n in range(3)]
    assert len(set(texts)) == 6
    assert tuple(writer.tokens([3], Sampling(30, 1.5, seed=1), 2)) == texts[-1]


def test_messages_go_through_the_chat_template_and_an_answer_ends(folder: Path) -> None:
    writer = open_writer(folder)
    prompt = writer.prompt_of([{"role": "user", "content": "how are you ?"}])
    assert [WORDS[i] for i in prompt] == ["<|user|>", "how", "are", "you", "?", "<|answer|>"]
    assert writer.ends == {0}


def test_text_is_given_in_whole_characters() -> None:
    """'é' is two bytes: nothing is said before the second one."""
    encoded = list("né\U0001f600!".encode())

    class Bytes(Writer):
        def tokens(self, prompt: Sequence[int], how: Sampling, sample: int = 0) -> Any:
            return iter(encoded)

    writer = Bytes(None, list, lambda ids: bytes(ids).decode(errors="replace"), frozenset(), None)  # type: ignore[arg-type]
    assert list(writer.write("", Sampling())) == ["n", "é", "\U0001f600", "!"]


def tokenizer_of(kind: str) -> Any:
    """A small tokenizer of tokenizers, trained on text with characters of 1 to 4 bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    lines = ["the thin cat, née Zoë, sat on 12 mats.", "Füße \U0001f600\U0001f680 日本語 the  end"] * 20
    if kind == "WordPiece":
        words = Tokenizer(models.WordPiece(unk_token="?"))
        words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
        words.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["?"]))
    elif kind == "byte-level BPE":
        words = Tokenizer(models.BPE())
        words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        words.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    else:  # as Llama 2: spaces are a character, bytes stand in for characters that it lacks, a first space is dropped
        words = Tokenizer(models.BPE(byte_fallback=True, unk_token="?"))
        words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        spaced = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        words.decoder = decoders.Sequence(spaced)
        special = ["?", *(f"<0x{byte:02X}>" for byte in range(256))]
        ascii_only = [line.encode("ascii", "ignore").decode() for line in lines]
        words.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=340, special_tokens=special))
    return words


@pytest.mark.parametrize("kind", ["byte-level BPE", "byte fallback", "WordPiece"])
def test_pieces_of_text_are_together_what_the_tokens_are_at_once(kind: str) -> None:
    words = tokenizer_of(kind)

    def decode(ids: Sequence[int]) -> str:
        return str(words.decode(list(ids), skip_special_tokens=False))

    texts = [
        "Zoë sat  on the \U0001f680, 日本語 née",
        " the end ",
        "1.2 ﷽ \U0001f469\u200d\U0001f680 ? mats",
        "\ufffd\ufffd a",
    ]
    for ids in [words.encode(text).ids for text in texts]:
        stream = TextStream(decode)
        pieces = [stream.add(i) for i in ids]
        assert "".join([*pieces, stream.rest()]) == decode(ids)
        assert len([piece for piece in pieces if piece]) >= len(decode(ids).split())  # not all at the end
    if kind == "byte-level BPE":  # whatever a model may write, characters broken off included
        for seed in range(50):
            ids = torch.randint(0, 330, (80,), generator=torch.Generator().manual_seed(seed)).tolist()
            stream = TextStream(decode)
            assert "".join([*map(stream.add, ids), stream.rest()]) == decode(ids)


def test_text_takes_time_by_its_length_also_where_no_character_ever_ends() -> None:
    for ids in (list(b"abcd efg" * 500), [0xFF] * 4000):
        decoded = 0

        def decode(some: Sequence[int]) -> str:
            nonlocal decoded
            decoded += len(some)
            return bytes(some).decode(errors="replace")

        stream = TextStream(decode)
        text = "".join([*map(stream.add, ids), stream.rest()])
        assert text == bytes(ids).decode(errors="replace") and decoded < 110 * len(ids)


def family(name: str) -> Writer:
    """A small model of transformers with weights at random, in fp64, that ends with tokens 0 and 1."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 23,
             "max_position_embeddings": 28, "intermediate_size": 24}  # fmt: skip
    more = {
        "GPT2": {}, "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
        "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
        "Gemma3Text": {"sliding_window": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    }[name]  # fmt: skip
    kind = {"Gemma3Text": "Gemma3"}.get(name, name)
    config = getattr(transformers, name + "Config")(**shape, **more, pad_token_id=0)
    model = getattr(transformers, kind + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(config).double().eval()
    model.set_experts_implementation("eager")  # grouped products know no fp64
    return Writer(model, list, str, frozenset((0, 1)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["GPT2", "Qwen3", "Mixtral", "Gemma3Text"])
def test_rows_of_a_batch_have_the_tokens_that_they_have_alone(name: str) -> None:
    """Prompts of 1 to 27 tokens (of 28 positions): rows end by a token, by their limit, and by the model's room."""
    writer, how = family(name), Sampling(20, 1.2, seed=9)
    prompts = [[5], [3, 4, 5, 6, 7, 8, 9], [2] * 27, [7, 6], [5], list(range(2, 16))]
    alone = [list(writer.tokens(prompt, how, 40 + n)) for n, prompt in enumerate(prompts)]
    rows = list(zip(*writer.rows(prompts, how, range(40, 46)), strict=True))
    assert [[token for token in row if token not in (None, 0, 1)] for row in rows] == alone
    assert len(alone[2]) <= 1 and alone[0] != alone[4] and len({len(row) for row in alone}) > 2
    assert alone[1] == without_cache(writer, prompts[1], how, 41)


def test_texts_that_are_made_together_are_those_that_are_made_alone(folder: Path) -> None:
    writer = open_writer(folder)
    texts = writer.write_all(["hello", "how are you"], Sampling(9, 1.0), [3, 4])
    assert texts == ["".join(writer.write(t, Sampling(9, 1.0), n)) for t, n in (("hello", 3), ("how are you", 4))]


def test_the_oldest_turns_make_room_and_the_system_message_stays(folder: Path) -> None:
    """The model has 40 positions; an answer has 10 of them, or max_new_tokens."""
    writer, system = open_writer(folder), {"role": "system", "content": "you"}
    turns = [{"role": role, "content": "hello world " * 3} for _ in range(3) for role in ("user", "assistant")]
    last = {"role": "user", "content": "how"}
    assert writer.fitted([system, *turns, last], Sampling(99)) == [system, *turns[4:], last]
    assert writer.fitted([*turns[2:], last], Sampling(4)) == [*turns[2:], last]
    long = {"role": "user", "content": "hello " * 35}
    assert writer.fitted([system, *turns, long], Sampling(99)) == [system, long]
    with pytest.raises(ConfigError, match="IG648"):
        writer.fitted([system, *turns, {"role": "user", "content": "hello " * 39}], Sampling(99))


def test_a_conversation_outlives_the_context_and_a_message_that_is_too_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The model's answers are asked of the same turns as if the refused message had not been there."""
    asked: list[Any] = []
    real = Writer.write

    def write(self: Writer, given: Any, how: Sampling, sample: int = 0) -> Any:
        asked.append([message["content"].split()[0] for message in given if message["role"] == "user"])
        return real(self, given, how, sample)

    def line(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    lines = iter(["hello world how are you ? ! hello", "how world how are you ? !", "you " * 50,
                  "world how are you ? ! how", "are you", "you ?", "? are you how are you hello"])  # fmt: skip
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(Writer, "write", write)
    assert main(["chat", str(folder), "--max-new-tokens", "5", "--temperature", "0"]) == 0
    errors = capsys.readouterr().err
    assert len(asked) == 6 and asked[:2] == [["hello"], ["hello", "how"]] and all(row[0] != "you" for row in asked[:4])
    assert errors.count("IG648") == 1 and errors.count("oldest turns are left out") == 1
    assert "hello" not in asked[-1] and asked[-1][-1] == "?"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    output = capsys.readouterr()
    return code, output.out if code == 0 else output.err


def test_lines_of_json_are_answered_in_their_order(folder: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "id": 7}\n\n{"messages": [{"role": "user", "content": "you ?"}]}\n')
    code, text = said(capsys, "generate", str(folder), "--prompts", str(file), "--json", "--samples", "2",
                      "--max-new-tokens", "5")  # fmt: skip
    rows = [json.loads(line) for line in text.splitlines()]
    assert code == 0 and [(r.get("id"), r["sample"]) for r in rows] == [(7, 0), (7, 1), (None, 0), (None, 1)]
    assert len({r["text"] for r in rows}) > 1
    code, rows_of_one = said(capsys, "generate", str(folder), "--prompts", str(file), "--json", "--samples", "2",
                             "--max-new-tokens", "5", "--batch", "1")  # fmt: skip
    assert code == 0 and rows_of_one == text
    code, alone = said(capsys, "generate", str(folder), "hello", "--max-new-tokens", "5")
    assert code == 0 and alone.strip("\n") == rows[0]["text"]


NO_PROMPTS = {
    "{}": "IG649: line 2 of",
    "[]": "IG649: line 2 of",
    "nothing": "prompts.jsonl: line 2 is no JSON",
    '{"prompt": 3}': "IG649: line 2 of",
    '{"prompt": "a", "messages": []}': "IG649: line 2 of",
    '{"messages": [{"role": "user"}]}': "message 1: it has no content",
    '{"messages": [{"role": "user", "content": ["a"]}]}': "IG649: line 2 of",
    '{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}': "IG649: line 2 of",
    '{"conversations": [{"from": "bing", "value": "a"}]}': "'from' is 'bing'",
    '{"conversations": [{"from": "gpt", "value": "a"}]}': "IG649: line 2 of",
}


@pytest.mark.parametrize("line", NO_PROMPTS)
def test_a_line_that_is_no_prompt_is_refused_before_anything_is_written(folder: Path, tmp_path: Path, capsys: Any,
                                                                        line: str) -> None:  # fmt: skip
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n' + line + "\n")
    code, text = said(capsys, "generate", str(folder), "--prompts", str(file))
    assert code == 2 and NO_PROMPTS[line] in text and "hello\n" not in text.split("IG")[0]


def test_a_file_without_prompts_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    code, text = said(capsys, "generate", str(folder), "--prompts", str(tmp_path / "none.jsonl"))
    assert code == 2 and "IG911" in text and '{"prompt": "a text"}' in text


USER, ANSWER = {"role": "user", "content": "you ?"}, {"role": "assistant", "content": "me"}
CONVERSATIONS = {
    "messages": {"messages": [USER, ANSWER]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "you ?"}, {"from": "gpt", "value": "me"}], "id": 7},
    "Alpaca": {"instruction": "you ?", "output": "me"},
}


def test_a_file_of_conversations_is_asked_without_the_answers_that_end_them(folder: Path, tmp_path: Path,
                                                                            capsys: Any) -> None:  # fmt: skip
    words, file = ["--json", "--max-new-tokens", "5", "--temperature", "0"], tmp_path / "chats.json"
    file.write_text(json.dumps(list(CONVERSATIONS.values())))  # an array, as ShareGPT's files are
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"messages": [USER]}) + "\n")
    expected = json.loads(said(capsys, "generate", str(folder), "--prompts", str(asked), *words)[1])["text"]
    code, text = said(capsys, "generate", str(folder), "--prompts", str(file), *words)
    rows = [json.loads(line) for line in text.splitlines()]
    assert code == 0 and rows == [{**given, "sample": 0, "text": expected} for given in CONVERSATIONS.values()]
    parquet = pytest.importorskip("pyarrow.parquet")
    given = {
        **CONVERSATIONS["ShareGPT"],
        "made": datetime.date(2026, 11, 28),
    }  # what JSON has no word for comes back as text
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist([given]), tmp_path / "chats.parquet")
    code, text = said(capsys, "generate", str(folder), "--prompts", str(tmp_path / "chats.parquet"), *words)
    assert code == 0 and json.loads(text) == {**given, "made": "2026-11-28", "sample": 0, "text": expected}


def test_what_is_missing_is_said_with_the_line_to_type(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert "IG645" in said(capsys, "generate", str(tmp_path / "nowhere"), "hello")[1]
    assert "IG935" in said(capsys, "generate", str(tmp_path), "hello")[1]
    assert "IG648" in said(capsys, "generate", str(folder), "hello " * 40)[1]
    assert "IG648" in said(capsys, "generate", str(folder), "")[1]
    code, text = said(capsys, "chat", str(folder), "--tokenizer", "bytes")
    assert code == 2 and "IG647" in text
    assert "IG646" in said(capsys, "generate", str(folder), "hello", "--tokenizer", str(tmp_path))[1]
    for wrong in (["--top-p", "2"], ["--temperature", "nan"], ["--max-new-tokens", "0"], ["--top-k", "x"]):
        assert said(capsys, "generate", str(folder), "hello", *wrong)[0] == 2
    assert said(capsys, "generate", str(folder))[0] == 2
    writer = open_writer(folder, tokenizer="bytes")
    with pytest.raises(ConfigError, match="IG647"):
        writer.prompt_of([{"role": "user", "content": "a"}])


@pytest.mark.medium
def test_a_conversation_in_a_terminal(folder: Path) -> None:
    """Two questions and the end of the input, in a terminal of its own; the model's words do not move it."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "isograd", "chat", str(folder), "--max-new-tokens", "4", "--temperature", "0"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=subprocess.STDOUT, close_fds=True)
    os.close(child)
    os.write(parent, b"how are you ?\n\nhello\n\x04")
    seen = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the terminal is closed
            break
        if not part:
            break
        seen += part
    os.close(parent)
    assert process.wait(60) == 0, seen
    assert seen.count(b"> ") == 4 and b"\x1b" not in seen.replace(b"\x1b[?2004h", b"").replace(b"\x1b[?2004l", b"")


@pytest.mark.medium
def test_a_run_and_its_checkpoint_write_as_the_folder_that_is_made_of_them(tmp_path: Path, capsys: Any) -> None:
    """A run of two steps on bytes, on the ranks of its layout; then `ckpt convert` beside it."""
    run = tmp_path / "run"
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 400)
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
    config = recipe.read_text().replace("- builtin: stdlib", f"- path: {tmp_path / 'tokens'}")
    (tmp_path / "run.yaml").write_text(config)
    command = [sys.executable, "-m", "isograd"]
    build = [*command, "data", "build", str(tmp_path / "tokens"), str(tmp_path / "text.txt"), "--tokenizer", "bytes"]
    subprocess.run(build, check=True, capture_output=True)
    train = [*command, "train", str(tmp_path / "run.yaml"), "--run", str(run), "--layout", "tp2", "--steps", "6"]
    done = subprocess.run([*train, "--batch", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    options = ["--max-new-tokens", "12", "--seed", "4"]
    by_run = said(capsys, "generate", str(run), "to be", *options)
    by_step = said(capsys, "generate", str(run / "checkpoints" / "step-00000006"), "to be", *options)
    assert main(["ckpt", "convert", str(run), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    by_folder = said(capsys, "generate", str(tmp_path / "out"), "to be", "--tokenizer", "bytes", *options)
    assert by_run == by_step == by_folder and by_run[0] == 0
    assert "IG646" in said(capsys, "generate", str(tmp_path / "out"), "to be")[1]


def test_a_checkpoint_that_its_run_prunes_meanwhile_gives_way_to_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-00000002").mkdir()
    found = iter([tmp_path / "step-00000001", tmp_path / "step-00000002"])

    def opened(place: Path) -> Any:
        if not place.is_dir():
            raise CheckpointError("IG935", seen="no such folder", path=place)
        return SimpleNamespace(manifest=SimpleNamespace(model=None))

    monkeypatch.setattr(writing, "_checkpoint_of", lambda _: next(found))
    monkeypatch.setattr("isograd.checkpoint.read.open_whole", opened)
    monkeypatch.setattr("isograd.hf.export.convert", lambda place, *_, **__: place)
    with writing.hugging_folder(tmp_path, "bytes") as (folder, _):
        assert folder == tmp_path / "step-00000002"
