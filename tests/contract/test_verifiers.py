"""Every verifier that comes with the package, and a user's own, in the pool, against one contract."""

import pytest
import verifier_suite as suite

from nearpolicy.protocols import ScoreItem
from nearpolicy.tasks.functions import Reward, RewardSpec
from nearpolicy.tasks.pool import RewardPool

OWN = """
def length(prompts, completions, **columns):
    return [len(c) / 10 for c in completions]

def answered(prompts, completions, answer, **columns):
    return [None if a == c else 0.0 for a, c in zip(answer, completions)]
"""


def item(completion, prompt="p", **columns) -> ScoreItem:
    return ScoreItem(prompt=prompt, completion=completion, columns=columns)


def case_of(spec: RewardSpec, right: ScoreItem, wrong: str, **more) -> suite.Case:
    return suite.Case(
        make=lambda: RewardPool(spec, workers=2, deadline_s=20), right=right, unanswerable=item(right.completion, right.prompt),
        wrong=ScoreItem(prompt=right.prompt, completion=wrong, columns=right.columns), **more,
    )  # fmt: skip


def arithmetic() -> suite.Case:
    from nearpolicy.tasks.arithmetic import ArithmeticTask

    task = ArithmeticTask()
    row = task.heldout.row(0)
    right = task.solution(row.prompt)
    return case_of(task.reward, item(right, row.prompt, **row.columns), right[:-1] + str((int(right[-1]) + 1) % 5))


def gym() -> suite.Case:
    pytest.importorskip("reasoning_gym")
    from nearpolicy.tasks.reasoning_gym import GymTask

    task = GymTask("products", {"min_digits": 3, "max_digits": 3})
    row = task.heldout.row(0)
    return case_of(task.reward, item(f"<answer>{row.columns['answer']}</answer>", row.prompt, **row.columns), "none")


def math() -> suite.Case:
    pytest.importorskip("math_verify")
    return case_of(RewardSpec.single("math_verify"), item(r"so \boxed{\frac{2}{4}}", answer="1/2"), "$3$")


def messages() -> suite.Case:
    return case_of(RewardSpec.single("number"), item("it is 1,000", [{"role": "user", "content": "p"}], answer=1000), "999")


def programs() -> suite.Case:
    from nearpolicy.tasks.sandbox import unavailable

    if unavailable():
        pytest.skip(f"no sandbox: {unavailable()}")
    return case_of(RewardSpec.single("code"), item("```python\nprint(7)\n```", cases=[{"input": "", "output": "7"}]), "seven, I think")


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own_rewards.py"
    path.write_text(OWN)
    return path


CASES = {
    "exact": lambda file: case_of(RewardSpec.single("exact"), item("yes", answer="yes"), "no"),
    "number": lambda file: case_of(RewardSpec.single("number"), item("is 3.", answer="3"), "4"),
    "number on messages": lambda file: messages(),
    "math_verify": lambda file: math(),
    "reasoning_gym": lambda file: gym(),
    "arithmetic": lambda file: arithmetic(),
    "code": lambda file: programs(),
    "a user's two": lambda file: case_of(
        RewardSpec((Reward(function=f"{file}:length", weight=0.5), Reward(function=f"{file}:answered", weight=2.0))),
        item("abcd", answer="abcd"), "ab", right_reward=0.5 * 0.4,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CASES))
def case(request, own_file):
    return CASES[request.param](own_file)


@pytest.fixture(scope="module")
def verifier(case):
    with case.make() as verifier:
        yield verifier


@pytest.mark.parametrize(
    "check",
    [suite.check_scores, suite.check_one_score_an_item_in_order, suite.check_failure_is_no_reward, suite.check_total_over_strange_completions],
)
def test_contract(check, verifier, case):
    check(verifier, case)


def test_close(own_file):
    suite.check_close(CASES["exact"](own_file))
