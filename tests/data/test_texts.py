"""Documents out of files: the same ones however files are cut, and each defect named with its file and line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isograd.data.manifest import InputFile, Recipe, Vocabulary
from isograd.data.texts import InputPart, cut, find_inputs, read
from isograd.errors import DataError
from tests.sizes import few

BYTES = Vocabulary("bytes", None, 257, 256)


def found(paths: list[Path]) -> tuple[InputFile, ...]:
    return find_inputs([str(path) for path in paths], Path("out"))


def texts_of(paths: list[Path], shard_bytes: int = 1 << 20, documents: str = "file", key: str = "text") -> list[str]:
    recipe = Recipe(BYTES, documents, key, 0.0, shard_bytes, found(paths))  # type: ignore[arg-type]
    return [text for parts in cut(recipe) for part in parts for text in read(recipe, part)]


def refusal(paths: list[Path], **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        texts_of(paths, **options)
    return caught.value


LINE = st.text(st.sampled_from("ab é語\t\r"), max_size=8)


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(LINE, min_size=1, max_size=20), end=st.booleans(), shard=st.integers(1, 60))
def test_lines_and_paragraphs_are_the_same_however_a_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: bool, shard: int
) -> None:
    text = "\n".join(lines) + "\n" * end
    if not text:
        return
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    stands = text.split("\n")[: None if not text.endswith("\n") else -1]
    assert texts_of([path], shard, "line") == [line.rstrip("\r") for line in stands]
    paragraphs: list[list[str]] = [[]]
    for line in stands:
        if line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    assert texts_of([path], shard, "blank") == ["\n".join(p).rstrip("\r\n") for p in paragraphs if p]


def test_a_file_is_cut_at_the_first_end_of_a_document_that_fills_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc\n" * 5)
    recipe = Recipe(BYTES, "line", "text", 0.0, 8, found([path]))
    assert [[(part.start, part.stop) for part in parts] for parts in cut(recipe)] == [[(0, 8)], [(8, 16)], [(16, 20)]]


@pytest.mark.parametrize("shard", [1, 30, 100, 10_000])
def test_json_lines_give_the_text_under_the_key_however_they_are_cut(tmp_path: Path, shard: int) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["one", "two\nlines", "", "é\U0001f41f", 'quo"te'] * 5
    path.write_text("\n".join(json.dumps({"id": i, "body": text}) for i, text in enumerate(texts)) + "\n\n")
    assert texts_of([path], shard, key="body") == texts


@pytest.mark.medium
@pytest.mark.parametrize("shard", [1, 200, 10_000])
def test_parquet_gives_its_rows_and_nulls_are_empty(tmp_path: Path, shard: int) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = ["one", None, "two\n", "é"] * 5
    parquet.write_table(pyarrow.table({"n": list(range(20)), "text": texts}), path, row_group_size=3)
    assert texts_of([path], shard) == [text or "" for text in texts]
    error = refusal([path], key="body")
    assert (error.code, "columns: n, text" in str(error)) == ("IG920", True)
    assert refusal([path], key="n").code == "IG920"
    path.write_bytes(path.read_bytes()[:-8])
    assert refusal([path]).code == "IG920"


def test_a_parquet_file_is_opened_once_for_a_shard_however_many_groups_it_has(tmp_path: Path, monkeypatch) -> None:
    import pyarrow
    from pyarrow import parquet

    path, opened = tmp_path / "a.parquet", []
    parquet.write_table(pyarrow.table({"text": ["a", "b"] * 50}), path, row_group_size=1)
    whole = parquet.ParquetFile
    monkeypatch.setattr(parquet, "ParquetFile", lambda *a, **k: opened.append(1) or whole(*a, **k))
    assert texts_of([path], 10_000) == ["a", "b"] * 50
    assert len(opened) == 2  # to cut it, and to read it
    parquet.write_table(pyarrow.table({}), path)
    assert refusal([path]).code == "IG920"


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"b\xff.txt")).write_text("text")
    assert refusal([tmp_path]).code == "IG910"


def test_folders_are_read_in_the_order_of_their_names_and_small_files_share_a_shard(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name, text in {"b.txt": "B", "a.txt": "A\n", "deep/er/c.py": "C", ".hidden": "H"}.items():
        (tmp_path / name).write_text(text)
    assert texts_of([tmp_path]) == ["A\n", "B", "C"]
    recipe = Recipe(BYTES, "file", "text", 0.0, 3, found([tmp_path]))
    assert [len(parts) for parts in cut(recipe)] == [2, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "x"', "line 3"),
        ("[1]", "list instead of an object"),
        ('{"txt": "x"}', "keys: 'txt'"),
        ('{"conversations": [{"from": "human", "value": "x"}]}', "isograd data build --chat"),
        ('{"instruction": "x", "output": "y"}', "isograd data build --chat"),
        ('{"text": 3}', "int instead of text"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "line 3"),
    ],
)
def test_a_broken_line_of_json_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n{{"text": "fine"}}\n')
    for shard in (1, 1 << 20):
        error = refusal([path], shard_bytes=shard)
        assert error.code == "IG913"
        assert said in str(error)
        assert "a.jsonl, line 3" in str(error)


@pytest.mark.parametrize("documents", ["file", "line", "blank"])
def test_text_that_is_not_utf8_is_named_with_line_and_byte(tmp_path: Path, documents: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\nstill good\nbad \xff\n")
    for shard in (1, 1 << 20):
        error = refusal([path], documents=documents, shard_bytes=shard)
        assert error.code == "IG912"
        assert "line 4" in str(error)
        assert "byte 0xff at place 21 " in str(error)


def test_inputs_that_are_not_there_empty_or_packed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "web.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "nothing").mkdir()
    codes = {name: refusal([tmp_path / name]).code for name in ("empty.txt", "web.jsonl.gz", "nothing", "absent.txt")}
    assert codes == {"empty.txt": "IG911", "web.jsonl.gz": "IG910", "nothing": "IG910", "absent.txt": "IG910"}


def test_a_file_that_is_named_twice_and_an_output_inside_its_input_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    assert "named twice" in str(refusal([tmp_path, path]))
    for inside in (tmp_path, tmp_path / "deep" / "out"):
        with pytest.raises(DataError, match="cannot be read as text") as caught:
            find_inputs([str(tmp_path)], inside)
        assert "choose an output folder outside" in str(caught.value)


def test_an_input_that_changes_under_the_build_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    recipe = Recipe(BYTES, "file", "text", 0.0, 100, found([path]))
    path.write_text("other")
    with pytest.raises(DataError) as caught:
        list(read(recipe, cut(recipe)[0][0]))
    assert caught.value.code == "IG917"


def test_parquet_without_its_package_says_which_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = refusal([tmp_path / "a.parquet"])
    assert error.code == "IG919"
    assert "pip install pyarrow" in str(error)


# -- what is larger than it should be: FAILURES E15 ------------------------------------------------------------------


def peak(code: str) -> tuple[float, str]:
    """(MiB that a process needed beyond what it had when the reading began, what it printed)."""
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom isograd.data import build, texts\n"
        "from isograd.errors import IsogradError\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\nbefore = peak()\n"
        f"try:\n    {code}\nexcept IsogradError as error:\n    print(error)\nprint(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said, _, last = done.stdout.rstrip().rpartition("\n")
    return float(last), said


@pytest.mark.medium
@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_a_document_takes_three_times_its_size_and_one_beyond_the_limit_none(tmp_path: Path, form: str) -> None:
    """A line of 400 MB took 2.8 GB."""
    size = 64
    with (tmp_path / f"in.{form}").open("wb") as file:
        file.write(b'{"text": "' if form == "jsonl" else b"")
        for _ in range(size):
            file.write(b"abcdefgh" * (1 << 17))
        file.write(b'"}\n' if form == "jsonl" else b"\n")
    where = f"build({str(tmp_path / 'out')!r}, [{str(tmp_path / f'in.{form}')!r}], validation=0"
    used, said = peak(where + ")")
    assert said == "" and used < 3.2 * size
    used, said = peak(where.replace("out", "other") + f", largest_document={16 << 20})")
    assert "IG910" in said and "more than 16,777,216 bytes" in said and "--largest-document" in said
    assert used < 24


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "lines.txt"])
def test_a_sparse_file_of_128_gb_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(128 << 30)
    recipe = Recipe(BYTES, "line" if name == "lines.txt" else "file", "text", 0.0, 1 << 20, found([tmp_path / name]))
    with pytest.raises(DataError, match=r"IG910(.|\n)*more than 1,048,576 bytes"):
        cut(recipe, largest=1 << 20)
    with pytest.raises(DataError, match=r"IG910(.|\n)*more than 1,048,576 bytes"):
        list(read(recipe, InputPart(0, 0, 128 << 30, 1, 1 << 20)))


@pytest.mark.medium
@pytest.mark.parametrize(
    "form", few(["stored once", "stored once, in lists", "packed", "nothing, often"], slow=["nothing, often"])
)
def test_a_parquet_file_that_opens_to_far_more_than_it_is_is_refused(tmp_path: Path, form: str) -> None:
    """523 bytes opened to 600 MB."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "a" * (1 << 20)
    once = arrow.DictionaryArray.from_arrays(arrow.array([0] * 600, arrow.int32()), [text])
    columns = {
        "stored once": once,
        "stored once, in lists": arrow.ListArray.from_arrays(list(range(0, 601, 2)), once),
        "packed": arrow.array([text] * 100),
        "nothing, often": arrow.nulls(9_000_000, arrow.string()),
    }
    path = tmp_path / "bomb.parquet"
    table = arrow.table({"text": columns[form]})
    parquet.write_table(table, path, compression="zstd", use_dictionary=form != "packed")
    assert path.stat().st_size < 30_000
    used, said = peak(f"print(sum(1 for _ in texts.values(Path({str(path)!r}))))")
    assert "IG920" in said and "opens to" in said
    assert used < 350
