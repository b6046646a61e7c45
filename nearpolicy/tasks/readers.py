"""Records from files: JSONL (plain, `.gz`, `.zst`), Parquet (extra `parquet`), Hugging Face dataset folders (extra `datasets`).

The only file that imports pyarrow or datasets, each on first use. Every record comes with the place it was read from, for error messages.
"""

import gzip
import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nearpolicy.errors import DataError, UsageError

Record = tuple[str, dict[str, Any]]
"""Where it was read ("train.jsonl:3"), and its columns."""

_MAX_SHOWN = 60
_PARQUET_BATCH = 4096


def read_records(path: str | Path, *, split: str | None = None) -> Iterator[Record]:
    """The records of a file or dataset folder, in order. A folder without a dataset in it gives its `*.parquet` or `*.jsonl*` files by name.

    Args:
        split: split of a dataset folder that has several ("train" when None).
    Raises:
        DataError: no such path, a kind of file that is not read, or contents that cannot be read (with file and line).
        UsageError: the extra that reads it is not installed.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"Data {path}", got="no such file or folder", expected="rows", do="Correct the path.")
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            yield from _read_dataset(path, split)
            return
        files = sorted(f for f in path.iterdir() if _kind(f))
        if not files:
            raise DataError(f"Data folder {path}", got="no data set and no .jsonl or .parquet file in it", expected="rows", do="Correct the path.")
        for file in files:
            yield from read_records(file)
        return
    kind = _kind(path)
    if kind is None:
        raise DataError(f"Data {path}", got=f"the suffix {path.suffix!r}", expected=".jsonl, .jsonl.gz, .jsonl.zst or .parquet",
                        do="Convert it, one JSON object a line.")  # fmt: skip
    yield from _read_parquet(path) if kind == "parquet" else _read_jsonl(path)


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return "parquet"
    plain = name.removesuffix(".gz").removesuffix(".zst")
    return "jsonl" if plain.endswith((".jsonl", ".ndjson", ".json")) else None


def _read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object a line; blank lines are passed over, a UTF-8 byte order mark is stripped."""
    number = 0
    try:
        with _open(path) as stream:
            for number, raw in enumerate(stream, 1):
                line = _decode(raw, path, number)
                if line:
                    yield f"{path.name}:{number}", _parse(line, path, number)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} after line {number}", got=str(error), expected="a whole file", do="Fetch or write it again.") from error


def _open(path: Path) -> IO[bytes]:
    name = path.name.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.open(path))
    if not name.endswith(".zst"):
        return path.open("rb")
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        raise UsageError(f"Data {path}", got="no package zstandard", expected="it, to read .zst", do="pip install zstandard, or use .gz.") from error
    # zstandard.open closes the file under it; its own errors are no OSError.
    return _Zst(zstandard, path)


class _Zst(io.BufferedReader):
    """Lines of a zstd file; damage is an OSError, like that of gzip."""

    def __init__(self, zstandard: Any, path: Path) -> None:
        self._error: type[Exception] = zstandard.ZstdError
        super().__init__(zstandard.open(path, "rb"))

    def __next__(self) -> bytes:
        try:
            return super().__next__()
        except self._error as error:
            raise OSError(str(error)) from error


def _decode(raw: bytes, path: Path, number: int) -> str:
    if number == 1:
        if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(f"{path}:1", got="a UTF-16 byte order mark", expected="UTF-8", do="Save the file as UTF-8.")
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode().strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}", got=f"byte 0x{raw[error.start]:02x} at column {error.start + 1}", expected="UTF-8",
                        do="Save the file as UTF-8.") from error  # fmt: skip


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "It looks like one JSON array: write one object a line." if number == 1 and line[0] == "[" else "Mend or drop the line."
        raise DataError(f"{path}:{number}", got=f"{line[:_MAX_SHOWN]!r} ({error})", expected="a JSON object", do=hint) from error
    if not isinstance(record, dict):
        raise DataError(f"{path}:{number}", got=f"a JSON {type(record).__name__}", expected="a JSON object", do="Write one object a line.")
    if "\\ud" in line.lower():
        _refuse_half_characters(record, path, number)
    return record


def _refuse_half_characters(record: dict[str, Any], path: Path, number: int) -> None:
    """An escape such as \\ud800 without its other half is valid JSON and no text: nothing can encode it."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(f"{path}:{number}", got=f"half a character, \\u{ord(half):04x}", expected="text",
                        do="Mend or drop the line; its writer cut a surrogate pair.") from error  # fmt: skip


def _read_parquet(path: Path) -> Iterator[Record]:
    parquet = _extra("pyarrow.parquet", "parquet", path)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_BATCH):
                for record in batch.to_pylist():
                    yield f"{path.name}:{number}", record
                    number += 1
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} after row {number}", got=str(error), expected="a Parquet file", do="Fetch or write it again.") from error


def _read_dataset(path: Path, split: str | None) -> Iterator[Record]:
    datasets = _extra("datasets", "datasets", path)
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"Data set {path}", got=f"{type(error).__name__}: {error}", expected="a folder of Dataset.save_to_disk",
                        do="Save it again.") from error  # fmt: skip
    if isinstance(found, dict):
        name = split or "train"
        if name not in found:
            raise DataError(f"Data set {path}", got=f"the splits {', '.join(found)}", expected=f"a split {name!r}", do="Name the split.")
        found = found[name]
    for number, record in enumerate(found):
        yield f"{path.name}:{number}", dict(record)


def _extra(module: str, extra: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"Data {path}", got=str(error), expected=f"the package {module.partition('.')[0]}",
                         do=f"Install it: pip install 'nearpolicy[{extra}]', or convert the data to JSONL.") from error  # fmt: skip
