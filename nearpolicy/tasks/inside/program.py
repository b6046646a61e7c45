"""The response's side: run as a script on one input, or loaded once and asked for its functions."""

from __future__ import annotations

import itertools
import os
import sys

from nearpolicy.tasks.inside.wire import MOST_ITEMS, decode, encode, loaded, receive, send, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def run_module(source: str, name: str) -> dict[str, Any]:
    """Run a program as the module `name`; its namespace."""
    module = type(sys)(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    return module.__dict__


def run_to_end(source: str) -> None:
    """Run the program as a script and leave as the interpreter would (threads, exit functions, exit code); never returns."""
    code = 1
    # The streams made at the start know the null device; these know the pipes.
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    try:
        run_module(source, "__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        pass
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        __import__("atexit")._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 1
    os._exit(code & 255)


class Served:
    """Answers requests about a loaded program. Objects that are no plain data stay here; the other side gets their number."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.objects: list[Any] = []

    def answer(self, request: list[Any]) -> Any:
        """["v", value, changed arguments], or ["x", exception, message] when it raised.

        Requests: ["name", name], ["call", object, args, kwargs], ["get", object, attribute], ["item", object, key], and ["len" | "list" |
        "str" | "bool", object].
        """
        kind, target, *rest = request
        try:
            if kind == "name":
                return self._value(self._named(target))
            subject = self.objects[target]
            if kind == "call":
                return self._call(subject, rest[0], rest[1])
            if kind == "get":
                return self._value(getattr(subject, rest[0]))
            if kind == "item":
                return self._value(subject[decode(rest[0], self._known)])
            return self._value(_VIEWS[kind](subject))
        except BaseException as error:
            return ["x", type(error).__name__, text_of(error)]

    def _value(self, value: Any) -> Any:
        return ["v", encode(value, self._keep), []]

    def _keep(self, value: Any) -> Any:
        self.objects.append(value)
        return ["o", len(self.objects) - 1]

    def _known(self, value: Any) -> Any:
        if value[0] != "o":
            raise ValueError("no value")
        return self.objects[value[1]]

    def _named(self, name: str) -> Any:
        """A name of the program, or a method of its class Solution where it has no such name."""
        if name in self.namespace:
            return self.namespace[name]
        solution = self.namespace.get("Solution")
        if isinstance(solution, type) and hasattr(solution, name):
            return getattr(solution(), name)
        raise NameError(f"name '{name}' is not defined")

    def _call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Containers among the arguments that the call has changed go back with the result, as a caller in the same process would see them."""
        decoded = [decode(a, self._known) for a in args]
        result = function(*decoded, **{k: decode(v, self._known) for k, v in kwargs.items()})
        changed = []
        for i, (before, after) in enumerate(zip(args, decoded, strict=True)):
            if isinstance(after, (list, dict, set, loaded("collections", "deque"))):
                now = encode(after, self._keep)
                changed += [[i, now]] if now != before else []
        return ["v", encode(result, self._keep), changed]


_VIEWS: dict[str, Any] = {"len": len, "list": lambda subject: list(itertools.islice(subject, MOST_ITEMS)), "str": str, "bool": bool}


def serve(source: str, requests: int, replies: int) -> None:
    """Load the program, then answer requests until the other end closes; never returns. A program that fails to load answers with that."""
    failure, served = None, Served({})
    try:
        served.namespace = run_module(source, "solution")
    except BaseException as error:
        failure = ["x", type(error).__name__, text_of(error)]
    try:
        while True:
            request = receive(requests)
            send(replies, failure or served.answer(request))
    finally:
        os._exit(1)
