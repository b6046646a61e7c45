"""Code tasks: programs found in responses, tests found in rows, verdicts, and how both fit the reward pool and the configuration."""

import json
import shutil

import pytest
from hostile_programs import CHECKED, RUN
from hypothesis import given, settings, strategies as st

from nearpolicy.build import build_task
from nearpolicy.errors import DataError, UsageError
from nearpolicy.layers import resolve
from nearpolicy.protocols import ScoreItem
from nearpolicy.rollout import Outcome
from nearpolicy.suites import Benchmark
from nearpolicy.tasks import code as code_module, sandbox
from nearpolicy.tasks.code import TOLERANCE, adapt, check_rewards, code, code_task, same_output, same_value
from nearpolicy.tasks.functions import RewardSpec
from nearpolicy.tasks.inside.judge import foreign_names
from nearpolicy.tasks.pool import RewardPool
from nearpolicy.tasks.programs import MOST_CHARACTERS, Case, RowTests, program_of, read_tests
from nearpolicy.tasks.sandbox import unavailable

walls = pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox: {unavailable()}")
QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=50)
NONE = RowTests()
HEAD = 'from typing import List\n\n\ndef total(values: List[int]) -> int:\n    """The sum.\n    >>> total([1, 2])\n    3\n    """\n'
HUMAN = {"task_id": "HumanEval/x", "prompt": HEAD, "entry_point": "total", "canonical_solution": "    return sum(values)\n",
         "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"}  # fmt: skip
MBPP = {"task_id": 7, "prompt": "Write a function to add two numbers.", "code": "def add(a, b):\n    return a + b",
        "test_imports": ["import math"], "test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(0.1, 0.2), 0.3)"]}  # fmt: skip


def score(row, response, prompt="p", **options):
    return code([row.get("prompt", prompt)], [response], **options, **{k: [v] for k, v in row.items() if k != "prompt"})[0]


def fenced(source, language="python"):
    return f"Here:\n\n```{language}\n{source}\n```\nDone."


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (fenced("print(1)"), "print(1)\n"),
        (fenced("print(1)", "py"), "print(1)\n"),
        (fenced("print(1)", ""), "print(1)\n"),
        (fenced("x = 1") + fenced("print(2)"), "print(2)\n"),  # the last one
        (fenced("print(1)") + fenced("ls", "bash"), "print(1)\n"),
        (fenced("not python at all ("), "not python at all (\n"),  # fenced as Python: it may fail by itself
        ("```python\nprint(1)", "print(1)"),  # cut off before the fence closes
        ("print(1)", "print(1)"),
        (fenced("int main() {}", "cpp"), None),
        (fenced("console.log(1)", "javascript"), None),
        ("int main() { return 0; }", None),
        ("I do not know.", None),
        ("", None),
        ("  \n", None),
        ("```python\n```", None),
        ("x = 1\n" * MOST_CHARACTERS, None),
        ("(" * 5000, None),
    ],
)
def test_the_program_of_a_response(response, program):
    assert program_of(response, NONE) == program


def test_a_prompt_that_is_code_is_continued_or_stands_in_front():
    tests = read_tests(HUMAN, HEAD)
    assert tests.prelude == HEAD
    assert program_of("    return sum(values)\n", tests) == HEAD + "    return sum(values)\n"
    assert program_of("    return sum(values)\n\nAnd that is it!", tests) == HEAD + "    return sum(values)\n\n"
    assert program_of(fenced("    return sum(values)"), tests) == HEAD + "    return sum(values)\n"
    whole = "def total(values):\n    return 0"
    assert program_of(fenced(whole), tests) == f"{HEAD}\n\n{whole}\n"
    assert program_of(fenced(f"from __future__ import annotations\n{whole}"), tests).startswith("from __future__")


@QUICK
@given(st.text(alphabet="`python\n (x)=1\t", max_size=60))
def test_any_response_is_safe(text):
    for tests in (NONE, read_tests(HUMAN, HEAD)):
        found = program_of(text, tests)
        assert found is None or isinstance(found, str)


PACKED = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLED = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [[3], "7"]}
ADDING = RowTests(cases=(Case("1 2\n", ("3\n",)), Case("3 4\n", ("7\n",))))


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"}]}, ADDING),
        ({"cases": [{"args": [1, 2], "result": 3}], "entry_point": "add"}, RowTests(cases=(Case([1, 2], (3,)),), function="add", entry="add")),
        ({"tests": "assert f(1)"}, RowTests(checks=("assert f(1)",))),
        ({"tests": ["assert f(1)", "assert f(2)"], "entry_point": "f"}, RowTests(checks=("assert f(1)", "assert f(2)"), entry="f")),
        ({"tests": '["assert f(1)"]'}, RowTests(checks=("assert f(1)",))),
        ({"test_list": ["assert f(1)"]}, RowTests(checks=("assert f(1)",))),
        ({"test_list": ["assert f(1)"], "test_setup_code": "x = 1"}, RowTests(checks=("x = 1\nassert f(1)",))),
        ({"reward_model": {"style": "rule", "ground_truth": json.dumps(PACKED)}}, ADDING),
        ({"answer": json.dumps(PACKED)}, ADDING),
        ({"input_output": PACKED}, ADDING),
        ({"ground_truth": {"inputs": [["1 2"]], "outputs": [["3", "4"]]}}, RowTests(cases=(Case("1 2", ("3\n4",)),))),
        ({"ground_truth": json.dumps(CALLED)}, RowTests(cases=(Case([1, 2], ([3], 3)), Case([3, 4], (7,))), function="add", entry="add")),
    ],
)
def test_formats_of_rows(row, tests):
    assert read_tests(row, "p") == tests


def test_mbpp_rows_name_their_function():
    tests = read_tests(MBPP, MBPP["prompt"])
    assert tests.entry == "add"
    assert tests.checks == tuple(f"import math\n{t}" for t in MBPP["test_list"])
    plus = read_tests({**MBPP, "test": "import numpy as np\nfor a, b, c in [(1, 2, 3)]:\n    assert add(a, b) == c"}, "p")
    assert len(plus) == 1
    assert plus.entry == "add"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p", "answer": None}, "no tests (the columns prompt, answer)"),
        ({}, "no tests (the columns none)"),
        ({"cases": []}, "the list is empty"),
        ({"tests": []}, "the list is empty"),
        ({"tests": ["  "]}, "the list is empty"),
        ({"cases": 3}, "cases that are no list of records"),
        ({"cases": "{"}, "that are no JSON"),
        ({"cases": [{"input": "1"}]}, "case 1 with input instead of input and output"),
        ({"cases": [{"input": "1", "output": "2"}], "entry_point": "f"}, "case 1 with input, output instead of args and result"),
        ({"cases": [{"args": "ab", "result": "ab"}], "entry_point": "f"}, "case 1 with args 'ab' that are no list"),
        ({"cases": [{"args": {"x": 1}, "result": 1}], "entry_point": "f"}, "that are no list"),
        ({"cases": [{"args": 1, "result": 1}], "entry_point": "f"}, "case 1 with args 1 that are no list"),
        ({"cases": [{"args": [1], "result": 1}], "entry_point": 3}, "entry_point 3 that is no name"),
        ({"cases": [{"args": [1], "result": 1}], "entry_point": "f g"}, "entry_point 'f g' that is no name"),
        ({"tests": ["assert f(1) == 1"], "entry_point": ["f"]}, "entry_point ['f'] that is no name"),
        ({"cases": [{"args": [1], "result": 1}], "tests": ["assert f(1) == 2"], "entry_point": "f"}, "cases and tests in one row"),
        ({"tests": {"a": "assert f(1) == 1"}}, "tests that are neither text nor a list"),
        ({"answer": {"inputs": [{"x": 1}], "outputs": [1], "fn_name": "f"}}, "neither text nor a list of arguments"),
        ({"tests": "assert f(1"}, "tests that do not parse (line 1)"),
        ({"tests": "x = 1\nassert f(1) ==", "entry_point": "f"}, "tests that do not parse (line 2)"),
        ({"tests": [1]}, "tests that are no text"),
        ({"test_list": ["int main() { }"]}, "tests that do not parse"),
        ({"answer": "42"}, "no tests: a record without inputs and outputs"),
        ({"answer": "\\frac{1}{2}"}, "that are no JSON"),
        ({"answer": {"inputs": ["1"], "outputs": []}}, "not lists of one length"),
        ({"answer": {"inputs": "1", "outputs": "2"}}, "not lists of one length"),
    ],
)
def test_rows_without_sense_are_one_clear_line_with_their_place(row, said, tmp_path):
    with pytest.raises(DataError) as caught:
        adapt("rows.jsonl:3", row)
    assert str(caught.value).startswith("rows.jsonl:3: got ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "p", "tests": "assert f(1)"}) + "\n" + json.dumps({**row, "prompt": "q"}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        code_task(str(path), heldout=1)


def test_rows_get_a_prompt_that_names_the_function_an_id_and_a_demonstration():
    record = adapt("x:1", MBPP)
    assert record["prompt"] == "Write a function to add two numbers.\n\nYour code should pass tests like this one:\n\nassert add(1, 2) == 3\n"
    assert record["id"] == 7
    assert record["demonstration"] == "```python\ndef add(a, b):\n    return a + b\n```"
    old = adapt("x:1", {"text": "Add.", "test_list": ["assert add(1, 2) == 3"]})
    assert old["prompt"].startswith("Add.\n\nYour code")
    human = adapt("x:1", HUMAN)
    assert human["prompt"] == HEAD
    assert human["demonstration"] == f"```python\n{HEAD}    return sum(values)\n```"


def test_foreign_names():
    source = """
import numpy as np
from math import floor as down
def helper(x, *rest, key=1, **more): return x + key + len(rest) + unknown(x)
class Own: pass
for i in range(3):
    assert f(i) == [g(j) for j in range(i)]
try: pass
except ValueError as error: print(error)
with Own() as own: own.method(np.zeros(down(2.5)))
"""
    assert foreign_names(source) == ["f", "g", "unknown"]


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1 2\n3", "1 2\n3\n", True),
        ("1  2 \n\n3\n\n", "1 2\n3", True),
        ("1", "2", False),
        ("", "1", False),
        ("", "", True),
        ("1 2", "1 2 3", False),
        ("0.3333333333", "0.3333333", True),
        ("1.0", "1", True),
        ("1.01", "1.0", False),
        ("1", "1.5", False),
        ("1000000000000001", "1000000000000002", False),  # whole numbers are exact
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("1e5", "100000", True),
        ("1_0.0", "10", False),
    ],
)
def test_output_is_compared_word_by_word(got, expected, same):
    assert same_output(got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ((1, (2, 3)), [1, [2, 3]], True),
        ([1], [1, 2], False),
        ({1: (2,)}, {"1": [2]}, True),
        ({1: 2}, {"2": 2}, False),
        (0.1 + 0.2, 0.3, True),
        (0.3 + 10 * TOLERANCE, 0.3, False),
        (2.0, 2, True),
        (True, True, True),
        ("a", "a", True),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        (10**400, 1.0, False),
        (1.0, 10**400, False),
        (float("nan"), 1.0, False),
        (sandbox.Strange(), 1, False),
    ],
)
def test_values_are_compared_as_json_would_have_them(got, expected, same):
    assert same_value(got, expected) is same


@walls
def test_scores_of_each_kind_of_row():
    scripts = {"cases": [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7"}, {"input": "0 0", "output": "0"}]}
    right, always_3 = fenced("print(sum(map(int, input().split())))"), fenced("print(3)")
    assert score(scripts, right) == 1
    assert score(scripts, always_3) == 0
    assert score(scripts, always_3, partial=True) == pytest.approx(1 / 3)
    assert score(scripts, "I do not know") == score(scripts, "") == score(scripts, fenced("int main;", "c")) == 0
    assert score(HUMAN, "    return sum(values)\n") == 1
    assert score(HUMAN, fenced("def total(values: List[int]) -> int:\n    return sum(values)")) == 1
    assert score(HUMAN, "    return 3\n") == 0
    assert score(MBPP, fenced("def add(a, b):\n    return a + b")) == 1
    assert score(MBPP, fenced("def add(a, b):\n    return 3"), partial=True) == 0.5
    assert score({"answer": json.dumps(CALLED)}, fenced("class Solution:\n    def add(self, a, b): return a + b")) == 1
    assert score({"answer": json.dumps(CALLED)}, fenced("def add(a, b): return [a + b]")) == 0


@walls
def test_messages_and_several_at_once():
    row = {"cases": [{"input": "", "output": "1"}]}
    answers = [[{"role": "assistant", "content": fenced(f"print({i})")}] for i in (1, 2)]
    assert code([[{"role": "user", "content": "p"}]] * 2, answers, cases=[row["cases"]] * 2) == [1, 0]


@walls
def test_tests_at_fault_raise_instead_of_scoring():
    for tests, said in (("import no_such_module\nassert f()", "ModuleNotFoundError"), ("assert True", "never call the program")):
        with pytest.raises(ValueError, match=f"the row's tests are at fault: .*{said}"):
            score({"tests": [tests], "entry_point": "f"}, fenced("def f(): return 1"))


@walls
def test_the_time_of_all_tests_together_is_bounded():
    row = {"cases": [{"input": str(i), "output": str(i)} for i in range(50)]}
    slow = fenced("import time\ntime.sleep(0.2)\nprint(input())")
    assert score(row, slow, total=0.5) == 0
    assert 0 < score(row, slow, total=0.5, partial=True) < 0.2


@walls
def test_every_shipped_problem_is_solved_by_its_own_solution_and_by_no_empty_one():
    task = code_task()
    rows = [part.row(i) for part in (task.train, task.heldout) for i in range(len(part))]
    assert len(task.train) >= 20
    assert len({row.id for row in rows}) == len(rows) == 30
    items = [ScoreItem(prompt=r.prompt, completion=c, columns=r.columns) for r in rows for c in (task.demonstration(r), fenced("pass"))]
    with RewardPool(task.reward, workers=2, deadline_s=60) as pool:
        assert [s.reward for s in pool.score(items)] == [1.0, 0.0] * len(rows)


@walls
def test_a_pool_full_of_hostile_programs_scores_them_all_and_stays_healthy():
    scripts = {"cases": [{"input": "", "output": "right"}]}
    checks = {"tests": ["assert answer() == 42"], "entry_point": "answer"}
    hostile = [(scripts, h.source.replace("{{", "{").replace("}}", "}")) for h in RUN.values()] + [(checks, source) for source in CHECKED.values()]
    assert len(hostile) >= 25
    spec = RewardSpec.single("code", timeout=0.3, total=0.5, memory_mb=128)
    with RewardPool(spec, workers=2, deadline_s=30) as pool:
        items = [ScoreItem(prompt="p", completion=fenced(source), columns=row) for row, source in hostile]
        scores = pool.score(items)
        assert [(s.outcome, s.reward) for s in scores] == [(Outcome.SCORE, 0.0)] * len(items)
        assert pool.restarts == 0
    with RewardPool(RewardSpec.single("code"), workers=2, deadline_s=30) as pool:
        after = pool.score([ScoreItem(prompt="p", completion=fenced("print('right')"), columns=scripts)] * 2)
        assert [s.reward for s in after] == [1.0, 1.0]


@walls
def test_a_worker_past_its_deadline_takes_its_sandbox_along():
    # The pool's own clock is a backstop: with the verifier's time above it the worker dies in the middle of a program.
    row = {"cases": [{"input": "", "output": "right"}]}
    with RewardPool(RewardSpec.single("code", timeout=30, total=30), workers=1, deadline_s=1.5) as pool:
        hung, fine = (ScoreItem(prompt="p", completion=fenced(s), columns=row) for s in ("while True: pass", "print('right')"))
        first, second = pool.score([hung, fine])
        assert first.outcome is Outcome.TIMEOUT
        assert second.reward == 1
    from test_sandbox import left_over, soon

    assert soon(lambda: not left_over())


def test_without_a_sandbox_nothing_runs_unless_a_flag_says_so(nowhere):
    row = {"cases": [{"input": "", "output": "1"}]}
    with pytest.raises(UsageError, match="no program bwrap"):
        score(row, fenced("print(1)"))
    assert score(row, fenced("print(1)"), allow_unsandboxed=True) == 1
    with pytest.raises(UsageError, match="no program bwrap"):
        build_task(resolve([{"task": {"kind": "code"}}]))
    task, spec = build_task(resolve([{"task": {"kind": "code", "allow_unsandboxed": True}}]))
    assert spec.rewards[0].options["allow_unsandboxed"] is True
    assert len(task.train) == 24


@walls
def test_the_flag_does_not_take_walls_down_that_are_there(monkeypatch):
    seen = []
    real = code_module.Session
    monkeypatch.setattr(code_module, "Session", lambda *a, **k: seen.append(k["unsandboxed"]) or real(*a, **k))
    assert score({"cases": [{"input": "", "output": "1"}]}, fenced("print(1)"), allow_unsandboxed=True) == 1
    assert seen == [False]


@walls
def test_configuration():
    task, spec = build_task(resolve([{"task": {"kind": "code", "timeout": 2, "partial": True}}]))
    assert [r.path for r in spec.rewards] == ["nearpolicy.tasks.code:code"]
    assert spec.rewards[0].options == {"timeout": 2.0, "total": 8.0, "memory_mb": 512, "partial": True, "allow_unsandboxed": False}
    assert len(task.heldout) == 6
    with pytest.raises(UsageError, match=r"task.deadline: got 5 s .* at least 13 s"):
        build_task(resolve([{"task": {"kind": "code", "deadline": 5}}]))
    with pytest.raises(UsageError, match="Did you mean 'timeout'"):
        build_task(resolve([{"task": {"kind": "code", "rewards": [{"function": "code", "options": {"time_out": 1}}]}}]))[1].functions()
    for wrong in ({"total": "8"}, {"total": 0}, {"timeout": -1}, {"memory_mb": 1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            check_rewards(RewardSpec.single("code", **wrong), 60.0)
    check_rewards(RewardSpec.single("code", total=1.0, timeout=1.0), 5.0)
    check_rewards(RewardSpec.single("number"), 0.1)


def test_a_code_benchmark_of_a_suite_is_a_code_task(tmp_path):
    path = tmp_path / "humaneval.jsonl"
    path.write_text(json.dumps(HUMAN) + "\n")
    config = Benchmark(name="humaneval", path=str(path), reward="code").configure({}, tmp_path, {})
    assert config.task.kind == "code"
    assert config.task.deadline > config.task.total + config.task.timeout
    rows = code_task(config.task.path, heldout_path=config.task.heldout_path).heldout
    assert rows.row(0).id == "HumanEval/x"


def test_parquet_rows_with_nested_ground_truth(tmp_path):
    """Eurus rows: messages as the prompt, tests as JSON in a nested record."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Add."}]
    rows = [{"prompt": messages, "reward_model": {"style": "rule", "ground_truth": json.dumps(PACKED)}, "ability": "code"}] * 2
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    shutil.copy(tmp_path / "rows.parquet", tmp_path / "held.parquet")
    row = code_task(str(tmp_path / "rows.parquet"), heldout_path=str(tmp_path / "held.parquet")).train.row(0)
    assert row.prompt == messages
    assert read_tests(row.columns, row.prompt) == ADDING
