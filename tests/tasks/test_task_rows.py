"""Rows from files: what is read, and what is refused with file and line."""

import gzip
import json
import sys
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import DataError, UsageError
from nearpolicy.tasks.functions import RewardSpec
from nearpolicy.tasks.rows import Columns, FileTask, ListRows, Row, load_rows, split_heldout

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=50)

RECORDS = [{"question": f"{k}+1?", "answer": str(k + 1), "level": k} for k in range(8)]


def jsonl(records) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in records).encode()


def write(tmp_path, content, name="train.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else jsonl(content))
    return path


def expected(name):
    return [Row(f"{name}:{k + 1}", f"{k}+1?", {"answer": str(k + 1), "level": k}) for k in range(8)]


def test_jsonl_plain_and_compressed(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    assert load_rows(write(tmp_path, RECORDS)) == expected("train.jsonl")
    packed = write(tmp_path, gzip.compress(jsonl(RECORDS)), "a.jsonl.gz")
    assert load_rows(packed) == expected("a.jsonl.gz")
    packed = write(tmp_path, zstandard.compress(jsonl(RECORDS)), "a.jsonl.zst")
    assert load_rows(packed) == expected("a.jsonl.zst")


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + jsonl(RECORDS[:1]) + b"\r\n\n" + jsonl(RECORDS[1:2]))
    assert [(r.id, r.prompt) for r in load_rows(path)] == [("train.jsonl:1", "0+1?"), ("train.jsonl:4", "1+1?")]


def test_parquet_with_messages_and_a_nested_answer(tmp_path):
    records = [
        {"data_source": "x", "prompt": [{"role": "user", "content": f"{k}?"}], "reward_model": {"style": "rule", "ground_truth": str(k)}, "id": k}
        for k in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    rows = load_rows(tmp_path / "a.parquet", needs_answer=True)
    assert [r.id for r in rows] == ["0", "1", "2"]
    assert rows[1].prompt == [{"role": "user", "content": "1?"}]
    assert rows[1].columns == {"data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}, "answer": "1", "id": 1}
    assert load_rows(tmp_path) == rows  # a folder of files


def test_dataset_folder(tmp_path, monkeypatch):
    (tmp_path / "dataset_dict.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'nearpolicy\[datasets\]'"):
        load_rows(tmp_path)
    fake = ModuleType("datasets")
    fake.load_from_disk = lambda path: {"train": RECORDS[:2], "test": RECORDS[2:3]}
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert [r.prompt for r in load_rows(tmp_path)] == ["0+1?", "1+1?"]
    assert [r.prompt for r in load_rows(tmp_path, split="test")] == ["2+1?"]
    with pytest.raises(DataError, match="splits train, test; expected a split 'validation'"):
        load_rows(tmp_path, split="validation")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"nearpolicy\[parquet\]"):
        load_rows(write(tmp_path, b"", "a.parquet"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="pip install zstandard"):
        load_rows(write(tmp_path, b"", "a.jsonl.zst"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no rows: it is empty"),
        (b"\n\n", "no rows: it is empty"),
        ([{"text": "a", "label": 1}], "columns text, label; expected a column prompt or question or problem or messages"),
        ([{"question": "a", "label": 1}], "columns question, label; expected a column answer or ground_truth or solution"),
        ([*RECORDS, {"question": "z"}], r"train.jsonl:9: got no answer"),
        ([*RECORDS, {"question": "z", "answer": None}], r"train.jsonl:9: got no answer"),
        ([*RECORDS, {"question": "z", "answer": ""}], r"train.jsonl:9: got no answer"),
        ([*RECORDS, {"answer": "1"}], r"train.jsonl:9: question: got nothing"),
        ([{"question": " ", "answer": "1"}], r"train.jsonl:1: question: got ' '"),
        ([{"question": 3, "answer": "1"}], r"train.jsonl:1: question: got 3"),
        ([{"messages": [{"role": "user"}], "answer": "1"}], r"train.jsonl:1: messages: .*text under role and content"),
        ([{"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}], "end with the assistant"),
        ([{"question": "a", "answer": "1", "id": 5}, {"question": "b", "answer": "1", "id": 5}], r"train.jsonl:2: got the id '5' of train.jsonl:1"),
        (jsonl(RECORDS) + b'{"question": "a",\n', r"train.jsonl:9: got '{\"question\": \"a\",'"),
        (jsonl(RECORDS) + b"[1]\n", r"train.jsonl:9: got a JSON list"),
        (b'[{"question": "a"},\n', "looks like one JSON array"),
        (b"[" * 100_000, "train.jsonl:1"),
        (b'{"question": "\xff"}\n', r"train.jsonl:1: got byte 0xff at column 15; expected UTF-8"),
        (jsonl(RECORDS) + b'{"question": "\\ud800 1+1=", "answer": "2"}\n', r"train.jsonl:9: got half a character, \\ud800"),
        (
            jsonl(RECORDS) + b'{"messages": [{"role": "user", "content": "\\uDFFF"}], "answer": "2"}\n',
            r"train.jsonl:9: got half a character, \\udfff",
        ),
        ("\ufeff{}".encode("utf-16"), "UTF-16 byte order mark"),
    ],
)
def test_bad_files(tmp_path, content, said):
    with pytest.raises(DataError, match=said):
        load_rows(write(tmp_path, content), needs_answer=True)


def test_whole_surrogate_pairs_are_text(tmp_path):
    (row,) = load_rows(write(tmp_path, b'{"question": "\\ud83d\\ude00 1+1=", "answer": "\\\\ud800"}'))
    assert (row.prompt, row.columns["answer"]) == ("\U0001f600 1+1=", "\\ud800")


def test_damaged_and_missing_files(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    for name, content in [
        ("cut.jsonl.gz", gzip.compress(jsonl(RECORDS * 100))[:-20]),
        ("not.jsonl.gz", jsonl(RECORDS)),
        ("not.jsonl.zst", jsonl(RECORDS)),
        ("cut.parquet", b"PAR1"),
    ]:
        with pytest.raises(DataError, match=r"expected a (whole|Parquet) file"):
            load_rows(write(tmp_path, content, name))
    assert zstandard
    with pytest.raises(DataError, match="no such file"):
        load_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"suffix '\.csv'"):
        load_rows(write(tmp_path, b"a,b", "a.csv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data set"):
        load_rows(tmp_path / "empty")


def test_columns_by_name_and_answers_only_where_they_are_read(tmp_path):
    path = write(tmp_path, [{"meta": {"q": "a?", "key": "k1"}, "final": "1"}, {"meta": {"q": "b?", "key": "k2"}}])
    rows = load_rows(path, columns=Columns(prompt="meta.q", answer="final", id="meta.key"))
    assert [(r.id, r.prompt, r.columns.get("answer")) for r in rows] == [("k1", "a?", "1"), ("k2", "b?", None)]
    with pytest.raises(DataError, match="columns meta, final; expected a column question"):
        load_rows(path, columns=Columns(prompt="question"))


@pytest.mark.parametrize(("name", "value"), [("answer", "1"), ("ground_truth", 2), ("solution", "3"), ("reward_model", {"ground_truth": "4"})])
def test_answer_aliases(tmp_path, name, value):
    (row,) = load_rows(write(tmp_path, [{"prompt": "p", name: value}]), needs_answer=True)
    assert row.columns["answer"] == (value["ground_truth"] if isinstance(value, dict) else value)
    assert row.columns[name] == value


ROWS = [Row(str(k), f"prompt {k % 40}") for k in range(100)]


@QUICK
@given(st.permutations(range(100)), st.floats(0.01, 0.97) | st.integers(1, 39), st.integers(0, 3))
def test_split_is_exact_disjoint_and_independent_of_file_order(order, heldout, seed):
    train, held = split_heldout(ROWS, heldout, seed=seed)
    assert not {r.prompt for r in train} & {r.prompt for r in held}
    assert sorted(train + held, key=lambda r: int(r.id)) == ROWS
    assert len({r.prompt for r in held}) == (heldout if heldout >= 1 else -int(-40 * heldout // 1))
    assert {r.id for r in split_heldout([ROWS[k] for k in order], heldout, seed=seed)[1]} == {r.id for r in held}


def test_split_depends_on_the_seed_and_has_bounds():
    assert split_heldout(ROWS, 5, seed=0)[1] != split_heldout(ROWS, 5, seed=1)[1]
    for bad in (0, -1, 1.5, float("nan")):
        with pytest.raises(UsageError):
            split_heldout(ROWS, bad)
    with pytest.raises(DataError, match="40 of 40 distinct prompts"):
        split_heldout(ROWS, 40)


def test_file_task(tmp_path):
    path = write(tmp_path, [{**r, "response": f"so {r['answer']}"} for r in RECORDS])
    task = FileTask(path, heldout=2, reward=RewardSpec.single("number"))
    assert (task.train.size, len(task.train), len(task.heldout)) == (6, 6, 2)
    assert task.demonstration(task.train.row(0)) == f"so {task.train.row(0).columns['answer']}"
    assert task.demonstration(Row("a", "b")) is None
    both = FileTask(path, heldout_path=write(tmp_path, RECORDS[:3], "test.jsonl"))
    assert (len(both.train), len(both.heldout)) == (8, 3)
    assert len(FileTask(path, heldout=0).heldout) == 0
    without = write(tmp_path, [{"prompt": "p"}], "p.jsonl")
    with pytest.raises(DataError, match="expected a column answer"):
        FileTask(without, heldout=0)
    assert len(FileTask(without, heldout=0, reward=RewardSpec.single("math:fsum")).train) == 1


def test_list_rows_bounds():
    rows = ListRows(ROWS)
    assert rows.row(99) is ROWS[99]
    for i in (-1, 100):
        with pytest.raises(IndexError):
            rows.row(i)
