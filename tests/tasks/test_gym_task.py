"""reasoning-gym data sets as tasks."""

import sys

import pytest

pytest.importorskip("reasoning_gym")

from nearpolicy.errors import UsageError
from nearpolicy.tasks.reasoning_gym import GymTask, create, own_score

OPTIONS = {"min_digits": 2, "max_digits": 4}


def test_rows_are_a_function_of_the_index_and_splits_do_not_meet():
    task, again = GymTask("products", OPTIONS, size=400, heldout=50), GymTask("products", OPTIONS, size=400, heldout=50)
    assert [task.train.row(i) for i in (7, 0, 399)] == [again.train.row(i) for i in (7, 0, 399)]
    row = task.train.row(0)
    assert row.id == "products-train-0"
    assert int(row.columns["answer"]) == eval(row.columns["metadata"]["expression"])
    assert (task.train.size, task.heldout.size) == (400, 50)
    assert task.shared_prompts() <= 2  # by chance among millions; neighbouring seeds would share 49
    assert task.demonstration(row) == row.columns["answer"]
    with pytest.raises(IndexError):
        task.train.row(400)


def test_few_distinct_questions_are_counted():
    assert GymTask("products", {"max_digits": 1}, size=2000, heldout=40).shared_prompts() == 40


def test_own_scoring():
    row = GymTask("products", OPTIONS).train.row(3)
    right = row.columns["answer"]
    columns = {"answer": [right] * 4, "metadata": [row.columns["metadata"]] * 4, "dataset": "products", "dataset_options": OPTIONS}
    completions = [right, f"so <answer>1</answer>, no: <answer> {right} </answer>", f" {right}\n", "<answer>1</answer>"]
    assert own_score([row.prompt] * 4, completions, **columns)[:3] == [1.0, 1.0, 1.0]
    assert own_score([row.prompt] * 4, completions, **columns)[3] < 1.0


def test_every_data_set_can_be_named():
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) > 90
    for name in ("gsm_symbolic", "chain_sum", "countdown"):
        assert create(name, {}, seed=1, size=2)[1]["question"]


@pytest.mark.parametrize(
    ("name", "options", "keywords", "said"),
    [
        ("product", {}, {}, "Did you mean 'products'"),
        ("products", {"max_digit": 1}, {}, "Did you mean 'max_digits'"),
        ("products", {"seed": 1}, {}, "got 'seed'"),
        ("products", {"min_digits": 3, "max_digits": 2}, {}, "max_digits must be >= min_digits"),
        ("products", {"min_digits": "x"}, {}, "Options of reasoning-gym products"),
        ("products", {}, {"size": 0}, "size"),
        ("products", {}, {"seed": -1}, "seed"),
        ("products", {}, {"seed": 2**30}, "seed"),
    ],
)
def test_refusals(name, options, keywords, said):
    with pytest.raises(UsageError, match=said):
        GymTask(name, options, **keywords)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"nearpolicy\[gym\]"):
        GymTask("products")
