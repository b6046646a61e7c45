"""Reward functions are found by path, or the reason why not is said."""

import os
import time
from pathlib import Path

import pytest

from nearpolicy.errors import UsageError
from nearpolicy.tasks.functions import VERIFIERS, FunctionFacts, Reward, RewardSpec, facts_of, load_function
from nearpolicy.tasks.verifiers import number

HOSTILE = str(Path(__file__).with_name("hostile.py"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_package.module:f", "ModuleNotFoundError"),
        ("no_such_file.py:f", "which is no file"),
        ("nearpolicy.tasks.verifiers:nummber", "Did you mean 'number'"),
        (f"{HOSTILE}:NOT_A_FUNCTION", "got a int; expected something that can be called"),
        ("nearpolicy.tasks.verifiers:", "package.module:function"),
    ],
)
def test_what_cannot_be_loaded(path, said):
    with pytest.raises(UsageError, match=said):
        load_function(path)


@pytest.mark.parametrize("body", ["raise RuntimeError('boom')", "import sys; sys.exit(2)", "def f(:"])
def test_a_file_that_fails_while_it_is_imported(tmp_path, body):
    (tmp_path / "bad.py").write_text(body)
    for _ in range(2):  # a failed import leaves nothing behind that would pass the second time
        with pytest.raises(UsageError, match="while importing"):
            load_function(f"{tmp_path}/bad.py:f")


def test_a_file_is_run_once_and_finds_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 7")
    (tmp_path / "mine.py").write_text("from neighbour_of_reward import VALUE\nclass A:\n    @staticmethod\n    def f(completions): return [VALUE]\n")
    assert load_function(f"{tmp_path}/mine.py:A.f")(["x"]) == [7]
    assert load_function(f"{tmp_path}/mine.py:A.f") is load_function(f"{tmp_path}/mine.py:A.f")


def test_short_names():
    assert load_function(VERIFIERS["number"]) is number
    assert RewardSpec.single("number").rewards[0].name == "number"
    assert Reward(function="a.b:c").name == "c"
    assert RewardSpec.single("number").needs_answer
    assert not RewardSpec.single("number", answer=["3"]).needs_answer
    assert not RewardSpec.single(f"{HOSTILE}:act").needs_answer
    with pytest.raises(UsageError, match="Did you mean 'math_verify'"):
        Reward(function="math-verify")
    for name in VERIFIERS:
        assert callable(load_function(VERIFIERS[name]))


def test_specs_that_make_no_sense():
    with pytest.raises(UsageError, match="finite"):
        Reward(function="number", weight=float("nan"))
    with pytest.raises(UsageError, match="no function"):
        RewardSpec(())
    with pytest.raises(UsageError, match="different name"):
        RewardSpec((Reward(function="number"), Reward(function="x:number")))


BODIES = [
    ("import time; time.sleep(1000)", r"did not import within 0\.5 s"),
    ("import os; os._exit(7)", r"ended its process while it was imported \(exit code 7\)"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"SIGKILL"),
    ("import os, sys; os.write(int(sys.argv[1]), b'\\0\\0\\0\\5junk!')", "wrote to the worker's connection"),
    ("import sys; sys.exit(2)", "SystemExit: 2 while importing"),
    ("raise RuntimeError('boom')", "RuntimeError: boom while importing"),
    ("def g(): ...", "no 'f' in"),
]


@pytest.mark.parametrize(("body", "said"), BODIES)
def test_a_users_module_is_imported_in_a_process_of_its_own(tmp_path, body, said):
    """Whatever it does there, this process goes on, at once, and says what happened."""
    (tmp_path / "bad.py").write_text(body)
    spec = RewardSpec.single(f"{tmp_path}/bad.py:f")
    begun = time.monotonic()
    with pytest.raises(UsageError, match=said) as caught:
        spec.functions(timeout_s=0.5 if "sleep" in body else 20)
    assert "bad.py" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 15


def test_a_users_module_never_runs_here_and_an_edited_file_is_read_again(tmp_path):
    file = tmp_path / "mine.py"
    body = f"import os\nopen({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')\ndef f(completions, answer): return [1.0]\n"
    file.write_text(body)
    spec = RewardSpec.single(f"{file}:f")
    assert spec.functions() == spec.functions() == [FunctionFacts(needs_answer=False, takes=("answer",))]
    file.write_text(body + "f.needs_answer = True\n")
    assert spec.needs_answer
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2  # once for each state of the file
    assert str(os.getpid()) not in pids


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("number", {"tolerence": 1}, "Did you mean 'tolerance'"),
        ("exact", {"ignorecase": True}, "Did you mean 'ignore_case'"),
        ("math_verify", {"precision": 6}, "Known: answer"),
        (f"{HOSTILE}:half", {"limit": 3}, "It takes none"),
        ("reasoning_gym", {}, "no option 'dataset'"),
        ("reasoning_gym", {"datset": "products"}, "Did you mean 'dataset'"),
    ],
)
def test_options_that_do_not_exist_or_lack_are_refused(function, options, said):
    with pytest.raises(UsageError, match=said):
        RewardSpec.single(function, **options).functions()


@pytest.mark.parametrize("name", ["prompts", "completions"])
def test_options_cannot_replace_what_every_function_is_given(name):
    with pytest.raises(UsageError, match=f"got '{name}'"):
        RewardSpec.single(f"{HOSTILE}:act", **{name: ["x"]})


def test_options_that_exist_are_taken():
    RewardSpec.single("number", tolerance=0.1, answer="3").functions()
    RewardSpec.single(f"{HOSTILE}:act", whatever=1).functions()
    assert facts_of(lambda completions, *, limit=3: []).takes == ("limit",)
    assert facts_of(lambda completions, **columns: []).takes is None
    assert facts_of(load_function(VERIFIERS["reasoning_gym"])).requires == ("dataset",)
