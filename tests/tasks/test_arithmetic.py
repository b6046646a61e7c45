"""The embedded arithmetic task."""

import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

import nearpolicy.tasks.arithmetic as module
from nearpolicy.errors import DataError, UsageError
from nearpolicy.tasks.arithmetic import ALPHABET, PLAIN_NOISE, STRATEGIC_NOISE, ArithmeticTask, arithmetic, is_heldout, parse
from nearpolicy.tasks.functions import load_function
from nearpolicy.tasks.rows import Row

PROMPT = "3a+4b*2c-0d*3="
LONG = "a+43=2b*22=4c-04=4d*34=2#2"
SHORT = "a+42b*24c-04d*32#2"


def score(text: str, answer: str) -> float | None:
    return arithmetic([PROMPT], [text], answer=[answer])[0]


def test_worked_example_in_both_styles():
    task = ArithmeticTask(modulus=5, num_ops=4)
    assert task.answer(PROMPT) == "2"
    assert task.solution(PROMPT, long=True) == LONG
    assert task.solution(PROMPT, long=False) == SHORT


def test_an_error_is_carried_on():
    task = ArithmeticTask(modulus=5, num_ops=4)
    # b: 2*2 = 4, written 0; c: 0-0 = 0; d: 0*3 = 0.
    assert task.solution(PROMPT, long=True, errors=[False, True, False, False]) == "a+43=2b*22=0c-00=0d*30=0#0"


def test_strategy_shifts_the_start_and_opens_the_response():
    task = ArithmeticTask(modulus=5, num_ops=4, strategies=(0.0, 0.0, 1.0))
    # start 3 + 2 = 0; a: 4; b: 8 = 3; c: 3; d: 9 = 4.
    assert task.hidden_strategy(PROMPT) == 2
    assert task.answer(PROMPT) == "4"
    assert task.solution(PROMPT, long=True, strategy=2) == "2a+40=4b*24=3c-03=3d*33=4#4"


def test_shapes_of_the_default():
    task = ArithmeticTask()
    row = task.train.row(0)
    assert len(row.prompt) == 26
    assert {len(task.solution(row.prompt, long=style)) for style in (True, False)} == {50, 34}
    assert task.max_tokens == 51
    assert ArithmeticTask(strategies=3).max_tokens == 52
    assert task.noise == PLAIN_NOISE
    assert ArithmeticTask(strategies=3).noise == STRATEGIC_NOISE


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (LONG, 1.0),
        (SHORT, 1.0),
        ("#2", 1.0),
        ("a+43=2#3", 0.0),
        ("a+43=2", 0.0),
        ("2", 0.0),
        ("", 0.0),
        ("#", 0.0),
        ("#22", 0.0),
        ("#2 ", 0.0),
        ("#1#2", 0.0),
        ("#2#2", 0.0),
    ],
)
def test_verifier(text: str, reward: float):
    assert score(text, "2") == reward


def test_verifier_scores_lists_in_order_and_ignores_other_columns():
    assert arithmetic(["p", "p", "p"], ["#1", "#2", "x"], answer=["1", "1", "1"], id=["a", "b", "c"]) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="zip"):
        arithmetic(["p"], ["#1"], answer=[])


@settings(max_examples=30, deadline=None)
@given(
    modulus=st.integers(2, 10),
    num_ops=st.integers(2, 14),
    seed=st.integers(0, 5),
    i=st.integers(0, 10**9),
    split=st.sampled_from(["train", "heldout"]),
)
def test_every_row_is_solved_by_its_solution(modulus: int, num_ops: int, seed: int, i: int, split: str):
    task = ArithmeticTask(modulus=modulus, num_ops=num_ops, seed=seed, heldout=10**9 + 1, strategies=2)
    row = getattr(task, split).row(i)
    assert row == getattr(ArithmeticTask(modulus=modulus, num_ops=num_ops, seed=seed, heldout=10**9 + 1, strategies=2), split).row(i)
    assert set(row.prompt) <= set(ALPHABET)
    assert is_heldout(row.prompt) == (split == "heldout")
    hidden = task.hidden_strategy(row.prompt)
    for long in (True, False):
        assert score(task.solution(row.prompt, long=long, strategy=hidden), row.columns["answer"]) == 1.0
        # Every step is a bijection: the other strategy, or one wrong step, changes the answer.
        assert score(task.solution(row.prompt, long=long, strategy=1 - hidden), row.columns["answer"]) == 0.0
        for wrong in range(num_ops):
            errors = [k == wrong for k in range(num_ops)]
            assert score(task.solution(row.prompt, long=long, strategy=hidden, errors=errors), row.columns["answer"]) == 0.0


def test_splits_never_meet_for_any_seed():
    train = {ArithmeticTask(num_ops=3, seed=seed).train.row(i).prompt for seed in (0, 1) for i in range(400)}
    heldout = {ArithmeticTask(num_ops=3, seed=seed).heldout.row(i).prompt for seed in (0, 1) for i in range(150)}
    assert not train & heldout
    assert len(heldout) > 250


def test_rows_depend_on_seed_split_and_index():
    a, b = ArithmeticTask(seed=0), ArithmeticTask(seed=1)
    prompts = [a.train.row(0), a.train.row(1), a.heldout.row(0), b.train.row(0), b.heldout.row(0)]
    assert len({r.prompt for r in prompts}) == 5
    assert [r.id for r in prompts[:3]] == ["arithmetic-train-0", "arithmetic-train-1", "arithmetic-heldout-0"]


def test_lengths_and_bounds():
    task = ArithmeticTask(heldout=3)
    assert task.train.size is None
    assert task.heldout.size == len(task.heldout) == 3
    with pytest.raises(TypeError, match="endless"):
        len(task.train)
    for i in (-1, 3):
        with pytest.raises(IndexError):
            task.heldout.row(i)
    assert ArithmeticTask(heldout=0).heldout.size == 0


def test_noise_has_the_promised_rate_in_each_style():
    task = ArithmeticTask(noise=(0.3, 0.05))
    wrong, steps = {True: 0, False: 0}, {True: 0, False: 0}
    for i in range(500):
        row = task.train.row(i)
        text = task.demonstration(row, i)
        long = len(text) == 50
        state, operations = parse(row.prompt)
        for k, operation in enumerate(operations):
            digit = int(text[6 * k + 5] if long else text[4 * k + 3])
            off = (digit - operation(state, 5)) % 5
            assert off in (0, 1)
            wrong[long] += off
            steps[long] += 1
            state = digit
        assert text.endswith(f"#{state}")
    # Binomial over about 2,000 steps each: four standard deviations.
    assert abs(wrong[True] / steps[True] - 0.3) < 4 * (0.21 / steps[True]) ** 0.5
    assert abs(wrong[False] / steps[False] - 0.05) < 4 * (0.0475 / steps[False]) ** 0.5
    assert abs(steps[True] / (steps[True] + steps[False]) - 0.5) < 4 * (0.25 / 500) ** 0.5


def test_demonstrations_are_a_function_of_row_and_index():
    task = ArithmeticTask()
    row = task.train.row(5)
    assert task.demonstration(row, 3) == ArithmeticTask().demonstration(row, 3)
    assert len({task.demonstration(row, i) for i in range(20)}) > 5
    assert ArithmeticTask(noise=(0.0, 0.0)).demonstration(row, 0)[-1] == row.columns["answer"]


def test_strategies_are_hidden_with_their_weights_and_shown_uniformly():
    task = ArithmeticTask(strategies=3)
    rows = [task.train.row(i) for i in range(600)]
    hidden = [task.hidden_strategy(r.prompt) for r in rows]
    shown = [int(task.demonstration(r, i)[0]) for i, r in enumerate(rows)]
    for s, weight in enumerate((0.6, 0.3, 0.1)):
        assert abs(hidden.count(s) / 600 - weight) < 4 * (weight * (1 - weight) / 600) ** 0.5
        assert abs(shown.count(s) / 600 - 1 / 3) < 4 * (2 / 9 / 600) ** 0.5
    right = [
        arithmetic([r.prompt], [task.solution(r.prompt, strategy=h)], answer=[r.columns["answer"]])[0] for r, h in zip(rows, hidden, strict=True)
    ]
    assert set(right) == {1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"modulus": 1}, {"modulus": 11}, {"num_ops": 0}, {"num_ops": 15}, {"heldout": -1}, {"strategies": 1}, {"strategies": 4},
        {"strategies": (1.0,)}, {"strategies": (0.0, 0.0)}, {"strategies": (0.5, float("nan"))}, {"strategies": (1, 1, 1), "modulus": 2},
        {"noise": (0.1, 1.0)}, {"noise": (-0.1, 0.1)}, {"noise": (0.1,)},
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(wrong: dict):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ArithmeticTask(**wrong)


@pytest.mark.parametrize("prompt", ["", "3=", "a+4=", "3a+4", "3a/4=", "3a+4=\n", "3z+4="])
def test_prompts_that_are_no_chain_are_refused(prompt: str):
    with pytest.raises(DataError, match="chain"):
        ArithmeticTask().demonstration(Row(id="x", prompt=prompt), 0)


def test_a_split_without_prompts_is_refused_not_searched_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "is_heldout", lambda prompt: False)
    monkeypatch.setattr(module, "_MAX_DRAWS", 50)
    task = ArithmeticTask(num_ops=2)
    assert task.train.row(0).id == "arithmetic-train-0"
    with pytest.raises(UsageError, match=r"heldout prompts.*more operations"):
        task.heldout.row(0)


def test_the_default_reward_is_found_and_needs_an_answer():
    spec = ArithmeticTask().reward
    assert load_function(spec.rewards[0].path) is arithmetic
    assert spec.needs_answer


def test_a_worker_that_imports_it_does_not_load_torch():
    code = "import sys, nearpolicy.tasks.arithmetic; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
