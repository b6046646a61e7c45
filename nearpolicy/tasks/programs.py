"""Programs in responses, and tests in rows: what is run, and what it is run against.

`read_tests` reads the columns of common data sets; `program_of` finds the program in a response. Nothing is run here. Light: no torch.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearpolicy.tasks.inside.judge import foreign_names

MOST_CHARACTERS = 100_000
"""A longer program is none."""
_PYTHON = frozenset({"", "python", "python3", "py", "py3"})
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_PACKED = ("answer", "ground_truth", "reward_model.ground_truth", "input_output", "test_cases")
_MOST_CUTS = 200
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Case:
    """An input and what should come of it."""

    given: Any
    """Text for the standard input, or a list of arguments."""
    expected: tuple[Any, ...]
    """Any of these will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTests:
    """The tests of one row: cases, or checks."""

    cases: tuple[Case, ...] = ()
    function: str | None = None
    """What cases call; None: they are inputs and outputs of a script."""
    checks: tuple[str, ...] = ()
    """Python sources with assertions."""
    entry: str | None = None
    """The one name of the program that the checks use, where the row says so."""
    prelude: str = ""
    """Code that the prompt holds (imports, helpers, the head of the function)."""

    def __len__(self) -> int:
        return len(self.cases) + len(self.checks)


def parse(source: str) -> ast.Module | None:
    """The syntax tree; None when this is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strange escapes
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def defined(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level by def, class, import or assignment."""
    out: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.add(node.name)
        elif isinstance(node, ast.Assign):
            out |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            out |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    return out


def program_of(response: str, tests: RowTests) -> str | None:
    """The program in a response: the last block fenced as Python (or without a language), else the whole text where it is Python.

    Where the prompt is code (HumanEval), it goes in front; a response that does not define the function again continues it, and what no
    longer parses at its end is cut off. None when there is no program: an empty response, prose, another language.
    """
    fenced = _FENCE.findall(response)
    blocks = [body for language, body in fenced if language.lower() in _PYTHON and body.strip()]
    text = blocks[-1] if blocks else "" if fenced else response
    if not text.strip() or len(text) > MOST_CHARACTERS:
        return None
    tree = parse(text)
    if not tests.prelude:
        return text if tree is not None or blocks else None
    if tree is not None and tests.entry in defined(tree):
        return text if text.lstrip().startswith("from __future__") else f"{tests.prelude}\n\n{text}"
    return _continued(tests.prelude, text)


def _continued(prelude: str, text: str) -> str | None:
    """The prompt's function with this body; lines at the end that break it are left out."""
    lines = text.splitlines()
    for count in range(len(lines), max(0, len(lines) - _MOST_CUTS), -1):
        source = prelude + "\n".join(lines[:count]) + "\n"
        if parse(source) is not None:
            return source
    return None


def read_tests(row: Mapping[str, Any], prompt: Any = None) -> RowTests:
    """The tests in the columns of a row. Formats, in the order looked for:

        cases [{input, output}]                             inputs and outputs of a script
        cases [{args, result}], entry_point                 calls of a function
        tests (one source or several), entry_point if any   assertions
        test, entry_point                                   HumanEval and HumanEval+; `prompt` is the function's head
        test or test_list, test_imports, test_setup_code    MBPP and MBPP+ (`code` names the function)
        {inputs, outputs, fn_name} as JSON                  Eurus, APPS, TACO: under answer, ground_truth, reward_model.ground_truth,
                                                            input_output or test_cases

    Raises:
        ValueError: no tests, or tests that make no sense or do not parse; in one line.
    """
    entry = row.get("entry_point") or None
    if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
        raise ValueError(f"entry_point {_short(entry)} that is no name of a function")
    if row.get("cases") is not None and row.get("tests") is not None:
        raise ValueError("cases and tests in one row: only one of them would be run")
    if row.get("cases") is not None:
        found = _cases(_unpacked(row["cases"], "cases"), entry)
    elif row.get("tests") is not None:
        found = RowTests(checks=_sources(row["tests"], "tests"), entry=entry, prelude=_prelude(prompt, entry))
    elif row.get("test") or row.get("test_list"):
        found = _mbpp_or_human_eval(row, prompt, entry)
    else:
        packed = next((value for name in _PACKED if (value := _nested(row, name)) not in (None, "")), None)
        if packed is None:
            raise ValueError(f"no tests (the columns {', '.join(row) or 'none'})")
        found = _packed(_unpacked(packed, "inputs and outputs"))
    if not len(found):
        raise ValueError("no tests: the list is empty")
    for check in found.checks:
        _refuse_what_does_not_parse(check)
    return found


def _refuse_what_does_not_parse(check: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(check)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise ValueError(f"tests that do not parse{f' (line {line})' if line else ''}: {error}") from None


def _cases(cases: Any, entry: str | None) -> RowTests:
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not all(isinstance(c, Mapping) for c in cases):
        raise ValueError("cases that are no list of records")
    keys = ("args", "result") if entry else ("input", "output")
    for i, case in enumerate(cases):
        if not set(keys) <= set(case):
            raise ValueError(f"case {i + 1} with {', '.join(case) or 'nothing'} instead of {' and '.join(keys)}")
        if entry and not isinstance(case["args"], list | tuple):
            raise ValueError(f"case {i + 1} with args {_short(case['args'])} that are no list")
    if entry:
        return RowTests(function=entry, entry=entry, cases=tuple(Case(list(c["args"]), (c["result"],)) for c in cases))
    return RowTests(cases=tuple(Case(_text(c["input"]), (_text(c["output"]),)) for c in cases))


def _mbpp_or_human_eval(row: Mapping[str, Any], prompt: Any, entry: str | None) -> RowTests:
    if entry:
        return RowTests(checks=_sources(row.get("test") or row.get("test_list"), "test"), entry=entry, prelude=_prelude(prompt, entry))
    setup = "\n".join([*_sources(row.get("test_imports") or [], "test_imports"), str(row.get("test_setup_code") or "")]).strip()
    checks = _sources(row.get("test") or row["test_list"], "test_list")
    checks = tuple(f"{setup}\n{check}" if setup else check for check in checks)
    reference = parse(str(row.get("code") or ""))
    names = set() if reference is None else defined(reference)
    for check in checks:
        _refuse_what_does_not_parse(check)
        names &= set(foreign_names(check))
    return RowTests(checks=checks, entry=next(iter(names)) if len(names) == 1 else None)


def _packed(found: Any) -> RowTests:
    """{inputs, outputs, fn_name}: with a function each input is a list of arguments, or text with one JSON value a line."""
    if not isinstance(found, Mapping) or not {"inputs", "outputs"} <= set(found):
        raise ValueError("no tests: a record without inputs and outputs")
    inputs, outputs, name = found["inputs"], found["outputs"], found.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs that are not lists of one length")
    if not name:
        return RowTests(cases=tuple(Case(_text(i), (_text(o),)) for i, o in zip(inputs, outputs, strict=True)))
    cases = []
    for given, wanted in zip(inputs, outputs, strict=True):
        if not isinstance(given, str | list):
            raise ValueError(f"inputs with {_short(given)}, which is neither text nor a list of arguments")
        args = [_json(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
        value = _json(wanted) if isinstance(wanted, str) else wanted
        # Some sets wrap the value in a list, some do not, and none says which.
        cases.append(Case(args, (value, value[0]) if isinstance(value, list) and len(value) == 1 else (value,)))
    return RowTests(function=str(name), entry=str(name), cases=tuple(cases))


def _prelude(prompt: Any, entry: str | None) -> str:
    """The prompt, where it is code that defines the entry point."""
    tree = parse(prompt) if isinstance(prompt, str) and entry else None
    return prompt if tree is not None and entry in defined(tree) else ""


def _sources(found: Any, what: str) -> tuple[str, ...]:
    found = _unpacked(found, what) if isinstance(found, str) and found.lstrip().startswith("[") and found.rstrip().endswith("]") else found
    if not isinstance(found, str | list | tuple):
        raise ValueError(f"{what} that are neither text nor a list")
    sources = [found] if isinstance(found, str) else list(found)
    if not all(isinstance(s, str) for s in sources):
        raise ValueError(f"{what} that are no text")
    return tuple(s for s in sources if s.strip())


def _unpacked(found: Any, what: str) -> Any:
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} {found[:_MAX_SHOWN]!r} that are no JSON ({error})") from None


def _short(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    """Input or output as text; a list is its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _nested(row: Mapping[str, Any], name: str) -> Any:
    found: Any = row
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
