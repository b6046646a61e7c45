"""What crosses a pipe between the processes of a sandbox: frames, and plain data as JSON.

A frame is its length (4 bytes, big-endian) and JSON. None, truth values, text and most numbers stand for themselves; everything else is a
list that begins with a tag. Nothing but plain data can arrive.

The modules of this folder are imported at every start of a sandbox and import next to nothing: typing, json, re, enum and contextlib would
treble the time that an interpreter takes to start.
"""

from __future__ import annotations

import itertools
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_ITEMS = 100_000
"""Values taken from an iterator that a program returns."""
MOST_BYTES = 2**28
"""Longest frame between processes that trust one another."""
_MESSAGE = 200
_CHUNK = 65536
_SMALL = 2**62


class Closed(Exception):
    """The other end is gone, or sent more than it may."""


class Unsupported(TypeError):
    """A value that is no plain data."""


class suppress:  # noqa: N801  # contextlib's, without its imports
    """Pass over these exceptions."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


def _json() -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    """(dumps, loads): the C halves of the json module, and the module itself where they are not what they were."""
    try:
        from _json import encode_basestring_ascii, make_encoder, make_scanner

        class Settings:
            strict, object_hook, object_pairs_hook, parse_float, parse_int, parse_constant = True, None, None, float, int, float

        encoder: Any = make_encoder({}, None, encode_basestring_ascii, None, ":", ",", False, False, True)  # type: ignore[arg-type]
        scan: Any = make_scanner(Settings)  # type: ignore[arg-type]

        def dumps(value: Any) -> str:
            return "".join(encoder(value, 0))

        def loads(text: str) -> Any:
            try:
                value, end = scan(text, 0)
            except StopIteration:
                raise ValueError("no JSON") from None
            if end != len(text):
                raise ValueError("more than one value")
            return value

        if loads(dumps([1, {"a": "\u00e9"}, None, 0.5])) == [1, {"a": "\u00e9"}, None, 0.5]:
            return dumps, loads
    except (ImportError, TypeError, ValueError, AttributeError):
        pass
    import json

    return json.dumps, json.loads


dumps, loads = _json()


def send(fd: int, message: Any) -> None:
    """Write one frame. Raises Closed when nobody reads."""
    body = dumps(message).encode()
    data = memoryview(len(body).to_bytes(4, "big") + body)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as error:
        raise Closed(str(error)) from None


def receive(fd: int, limit: int = MOST_BYTES, due: float | None = None) -> Any:
    """Read one frame.

    Raises:
        Closed: the end of the stream, more than `limit` bytes, or no JSON. TimeoutError: `due` (monotonic) passed first.
    """
    size = int.from_bytes(_exactly(fd, 4, due), "big")
    if size > limit:
        raise Closed(f"{size} bytes in one answer")
    try:
        return loads(_exactly(fd, size, due).decode())
    except (ValueError, RecursionError) as error:
        raise Closed(f"no message: {error}") from None


def _exactly(fd: int, size: int, due: float | None) -> bytes:
    out = bytearray()
    while len(out) < size:
        if due is not None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, 1000 * (due - time.monotonic()))):
                raise TimeoutError
        try:
            part = os.read(fd, min(_CHUNK, size - len(out)))
        except OSError as error:
            raise Closed(str(error)) from None
        if not part:
            raise Closed("the end of the stream")
        out += part
    return bytes(out)


def encode(value: Any, keep: Callable[[Any], Any] | None = None) -> Any:
    """Plain data as JSON: None, truth values, numbers, text, bytes, the standard containers, ranges, decimals, fractions, dates; arrays and
    iterators become lists. Subclasses become their base: a named tuple a tuple, a Counter a dict.

    Args:
        keep: what to put for anything else; None raises.
    Raises:
        Unsupported: anything else.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_SMALL < number < _SMALL else ["i", hex(number)]
    if isinstance(value, float):
        real = float.__float__(value)
        return real if abs(real) < float("inf") else ["f", repr(real)]
    for kind, tag in _CONTAINERS:
        if isinstance(value, kind):
            return [tag, *(encode(v, keep) for v in value)]
    if isinstance(value, dict):
        return ["d", *(encode(v, keep) for pair in dict.items(value) for v in pair)]
    return _encode_rare(value, keep)


def _encode_rare(value: Any, keep: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, bytes | bytearray):
        return ["b", value.hex()]
    if isinstance(value, complex):
        return ["c", encode(value.real), encode(value.imag)]
    if isinstance(value, range):
        return ["r", value.start, value.stop, value.step]
    if isinstance(value, loaded("collections", "deque")):
        return ["q", *(encode(v, keep) for v in value)]
    for module, name in _RARE:
        if isinstance(value, loaded(module, name)):
            return ["F", encode(value.numerator), encode(value.denominator)] if name == "Fraction" else [name, str(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    if isinstance(value, _ITERATORS):
        return ["g", *(encode(v, keep) for v in itertools.islice(value, MOST_ITEMS))]
    if keep is None:
        raise Unsupported(f"a {type(value).__name__}")
    return keep(value)


def decode(value: Any, keep: Callable[[Any], Any] | None = None) -> Any:
    """What `encode` wrote. `keep` gets what its own `keep` had put.

    Raises:
        ValueError, TypeError, LookupError: nothing that `encode` writes (an unhashable key among it).
    """
    if not isinstance(value, list):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError("no value")
    tag, *parts = value
    if tag in _MAKERS:
        return _MAKERS[tag]([decode(v, keep) for v in parts])
    if tag == "d":
        items = [decode(v, keep) for v in parts]
        return dict(zip(items[::2], items[1::2], strict=True))
    if tag in _SCALARS:
        return _SCALARS[tag](*parts)
    if keep is None:
        raise ValueError("no value")
    return keep(value)


def loaded(module: str, name: str) -> Any:
    """A type for isinstance, or () while its module is not loaded: there is then no value of it."""
    return getattr(sys.modules[module], name) if module in sys.modules else ()


def _rare(module: str, name: str) -> Any:
    return getattr(__import__(module), name)


def _generator() -> Any:
    yield


_CONTAINERS: tuple[tuple[Any, str], ...] = ((list, "l"), (tuple, "t"), (frozenset, "z"), (set, "s"))
_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "l": list, "t": tuple, "z": frozenset, "s": set, "g": iter, "q": lambda items: _rare("collections", "deque")(items),
}  # fmt: skip
_RARE = (("fractions", "Fraction"), ("decimal", "Decimal"), ("datetime", "datetime"), ("datetime", "date"), ("datetime", "time"))
_SCALARS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": float,
    "b": bytes.fromhex,
    "c": lambda real, imag: complex(decode(real), decode(imag)),
    "r": range,
    "F": lambda top, bottom: _rare("fractions", "Fraction")(decode(top), decode(bottom)),
    "Decimal": lambda text: _rare("decimal", "Decimal")(text),
    "datetime": lambda text: _rare("datetime", "datetime").fromisoformat(text),
    "date": lambda text: _rare("datetime", "date").fromisoformat(text),
    "time": lambda text: _rare("datetime", "time").fromisoformat(text),
}
_ITERATORS: tuple[Any, ...] = (
    type(_generator()), map, filter, zip, enumerate, reversed, itertools.chain, itertools.count, itertools.islice, itertools.permutations,
    itertools.combinations, itertools.product, type({}.keys()), type({}.values()), type({}.items()), type(iter([])), type(iter(())),
)  # fmt: skip


def text_of(error: BaseException, *, named: bool = False) -> str:
    """An exception's message in one short line, behind its kind when `named`."""
    try:
        text = " ".join(str(error).split())[:_MESSAGE]
    except BaseException:
        text = "(its message cannot be read)"
    return f"{type(error).__name__}: {text}" if named else text
