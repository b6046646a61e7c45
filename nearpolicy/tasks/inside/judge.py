"""The tests' side: runs their code and reaches the program over a pipe."""

from __future__ import annotations

import builtins
import sys

from nearpolicy.tasks.inside.wire import Closed, Unsupported, decode, encode, loaded, receive, send, suppress, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Gone(BaseException):
    """The program can no longer be asked. No `except Exception` of a test catches it."""


class Failure(Exception):
    """An exception of the program that is none of Python's own."""


class Line:
    """Asks the program."""

    def __init__(self, requests: int, replies: int, limit: int) -> None:
        self._requests, self._replies, self._limit = requests, replies, limit
        self.calls = 0
        self.lost = ""
        """Why the program can no longer be asked."""
        self.unsupported = ""
        """What the tests handed over that is no plain data."""
        self.raised: Exception | None = None
        """The program's last exception."""

    def ask(self, *request: Any) -> Any:
        """Value and changed arguments. Raises what the program raised, or Gone."""
        try:
            send(self._requests, request)
            kind, first, second = receive(self._replies, self._limit)
            if kind == "v":
                return decode(first, self._remote), second
        except (Closed, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            self.lost = text_of(error)
            raise Gone(self.lost) from None
        self.raised = _exception(str(first), str(second))
        raise self.raised

    def encoded(self, value: Any) -> Any:
        """An argument on its way to the program."""
        try:
            return encode(value, self._number)
        except Unsupported as error:
            self.unsupported = str(error)
            raise

    def _number(self, value: Any) -> Any:
        if type(value) is Remote:
            return ["o", value._at]
        raise Unsupported(f"a {type(value).__name__} as an argument")

    def _remote(self, value: Any) -> Any:
        if value[0] != "o" or not isinstance(value[1], int):
            raise ValueError("no value")
        return Remote(self, value[1])


class Remote:
    """An object that lives in the program. It compares by identity: what it equals is not for the program to say."""

    def __init__(self, line: Line, at: int) -> None:
        self._line, self._at = line, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._line.calls += 1
        sent = [self._line.encoded(a) for a in args]
        value, changed = self._line.ask("call", self._at, sent, {k: self._line.encoded(v) for k, v in kwargs.items()})
        for i, now in changed:
            own = args[i]
            if isinstance(own, (list, dict, set, loaded("collections", "deque"))):
                fresh = decode(now, self._line._remote)
                own.clear()
                (own.update if isinstance(own, (dict, set)) else own.extend)(fresh)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._line.ask("get", self._at, name)[0]

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask("item", self._at, self._line.encoded(key))[0]

    def __len__(self) -> int:
        return int(self._line.ask("len", self._at)[0])

    def __iter__(self) -> Any:
        return iter(self._line.ask("list", self._at)[0])

    def __str__(self) -> str:
        return str(self._line.ask("str", self._at)[0])

    def __bool__(self) -> bool:
        return bool(self._line.ask("bool", self._at)[0])


def _exception(name: str, message: str) -> Exception:
    """Python's own exception of this name, so that tests can expect it; else a Failure."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # some want more than a message
            pass
    return Failure(f"{name}: {message}")


def foreign_names(source: str) -> list[str]:
    """Names that a source reads and neither binds anywhere nor finds among the builtins. Raises SyntaxError."""
    import symtable

    read: set[str] = set()
    bound: set[str] = set(dir(builtins))
    tables = [symtable.symtable(source, "tests.py", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced():
                read.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_parameter() or symbol.is_imported():
                bound.add(symbol.get_name())
    return sorted(read - bound)


def judge(request: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """Run the tests and give the verdict, {"end", "message"}: `ok`, `failed`, `died` (the program), or `tests` when the tests are at fault.

    The program is asked for the entry point, or without one for the names that neither the tests nor Python know. Standard modules that the
    tests forgot to import are imported here: names of the program never stand in for them or for builtins.
    """
    entry, source, own = request["entry"], request["tests"], True
    namespace: dict[str, Any] = {"__name__": "tests"}
    message = ""
    try:
        if request["prelude"]:
            exec(compile(request["prelude"], "prompt.py", "exec"), namespace)
        names = foreign_names(source)
        for name in names:
            if name not in namespace and name != entry and name in sys.stdlib_module_names:
                namespace[name] = __import__(name)
        code, own = compile(source, "tests.py", "exec"), False
        for name in [entry] if entry else [n for n in names if n not in namespace]:
            namespace.pop(name, None)
            with suppress(NameError):  # the tests will miss it themselves, if they come to it
                namespace[name] = line.ask("name", name)[0]
        exec(code, namespace)
        # In HumanEval's shape the tests define check(candidate) and leave the call to their harness.
        if entry and callable(namespace.get("check")) and not line.calls:
            namespace["check"](namespace[entry])
    except Gone:
        pass
    except BaseException as error:
        message = text_of(error, named=True)
        own = own or (isinstance(error, ImportError) and error is not line.raised)
    if line.lost:
        return {"end": "died", "message": f"the program ended: {line.lost}"}
    if line.unsupported:
        return {"end": "tests", "message": f"they hand over {line.unsupported}"}
    if message:
        return {"end": "tests" if own else "failed", "message": message}
    return {"end": "ok", "message": ""} if line.calls else {"end": "tests", "message": "they never call the program"}
