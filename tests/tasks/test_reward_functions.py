"""Reward functions are found by path, or the reason why not is said."""

from pathlib import Path

import pytest

from nearpolicy.errors import UsageError
from nearpolicy.tasks.functions import VERIFIERS, Reward, RewardSpec, load_function
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
    assert RewardSpec.single("number").functions() == [number]
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
