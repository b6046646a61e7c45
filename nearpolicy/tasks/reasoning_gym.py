"""Any data set of reasoning-gym by name and options (extra `gym`), with its own scoring or the last number as verifier.

The only file that imports reasoning_gym, on first use. Reward workers import this module: no torch.
"""

import dataclasses
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nearpolicy.errors import UsageError, nearest
from nearpolicy.tasks.functions import RewardSpec
from nearpolicy.tasks.rows import Row
from nearpolicy.tasks.verifiers import text_of

HELDOUT_SEED_OFFSET = 2**30
"""Row i of a data set is drawn from seed + i, so neighbouring seeds share all but one row: the held-out seed lies this far off."""


def _library() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UsageError("Task reasoning_gym", got=str(error), expected="the package reasoning-gym",
                         do="Install it: pip install 'nearpolicy[gym]'.") from error  # fmt: skip


def create(name: str, options: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """A reasoning-gym data set.

    Raises:
        UsageError: no such data set or option, a value it refuses, or the package is not installed.
    """
    _library()
    registry = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in registry:
        raise UsageError("reasoning-gym data set", got=repr(name), expected=f"one of {len(registry)} names", do=nearest(name, registry))
    dataset_class, config_class = registry[name]
    known = {f.name for f in dataclasses.fields(config_class)} - {"seed", "size"}
    for option in options:
        if option not in known:
            raise UsageError(f"Option of reasoning-gym {name}", got=repr(option), expected="an option of its generator",
                             do=nearest(option, known))  # fmt: skip
    try:
        config = config_class(**options, seed=seed, size=size)
        if hasattr(config, "validate"):
            config.validate()
        return dataset_class(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"Options of reasoning-gym {name}", got=f"{dict(options)} ({error})", expected="values it accepts",
                         do="Correct them.") from error  # fmt: skip


class GymRows:
    """Rows of one split, drawn by index."""

    def __init__(self, dataset: Any, name: str, split: str, size: int) -> None:
        self._dataset, self._prefix = dataset, f"{name}-{split}"
        self.size: int | None = size
        self._size = size

    def __len__(self) -> int:
        return self._size

    def row(self, i: int) -> Row:
        """Row i, 0 <= i < size, with the columns answer and metadata; IndexError outside."""
        if not 0 <= i < self._size:
            raise IndexError(f"row {i} of {self._size}")
        entry = self._dataset[i]
        return Row(f"{self._prefix}-{i}", entry["question"], {"answer": entry["answer"], "metadata": entry["metadata"]})


class GymTask:
    """A reasoning-gym data set as a task.

    Train and held-out rows come from seeds that never meet. A generator with few distinct questions (one-digit products have 100) still
    repeats them in both: `shared_prompts` counts.

    Args:
        name: data set, for example "products".
        options: of its generator, for example {"max_digits": 1}.
        seed: first training seed, 0 <= seed < 2**30.
        size, heldout: rows of each split; size >= 1, heldout >= 0.
        verifier: "own" scores with the data set's `score_answer`; "number" compares the last number.
    Raises:
        UsageError: as `create`; or a seed or size outside its bounds.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        size: int = 100_000,
        heldout: int = 256,
        verifier: Literal["own", "number"] = "own",
    ) -> None:
        options = dict(options or {})
        for what, value, good in (("seed", seed, seed >= 0), ("size", size, size >= 1), ("heldout", heldout, heldout >= 0)):
            if not good or value >= HELDOUT_SEED_OFFSET or seed + size > HELDOUT_SEED_OFFSET:
                raise UsageError(f"Task reasoning_gym: {what}", got=value, expected=f"seed + size at most {HELDOUT_SEED_OFFSET}, rows to train on",
                                 do=f"Change {what}.")  # fmt: skip
        self.train = GymRows(create(name, options, seed=seed, size=size), name, "train", size)
        held = create(name, options, seed=seed + HELDOUT_SEED_OFFSET, size=max(heldout, 1))
        self.heldout = GymRows(held, name, "heldout", heldout)
        own = RewardSpec.single("reasoning_gym", dataset=name, dataset_options=options)
        self.reward = own if verifier == "own" else RewardSpec.single(verifier)

    def demonstration(self, row: Row, index: int = 0) -> str | None:
        """The answer alone; these data sets hold no worked solutions."""
        return str(row.columns["answer"])

    def shared_prompts(self, first: int = 1000) -> int:
        """How many held-out rows have a question that is also among the first training rows."""
        trained = {self.train.row(i).prompt for i in range(min(first, len(self.train)))}
        return sum(self.heldout.row(i).prompt in trained for i in range(len(self.heldout)))


@functools.lru_cache(maxsize=8)
def _scorer(dataset: str, options: str) -> tuple[Any, Any]:
    return create(dataset, json.loads(options), seed=0, size=1).score_answer, importlib.import_module("reasoning_gym.utils").extract_answer


def own_score(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answer: Sequence[Any],
    metadata: Sequence[Any],
    dataset: str,
    dataset_options: Mapping[str, Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """The data set's `score_answer`, usually in [0, 1], of the text in the last <answer></answer> pair, else of the whole completion, stripped.

    Raises:
        UsageError: as `create`.
    """
    score, extract = _scorer(dataset, json.dumps(dict(dataset_options or {}), sort_keys=True))
    out: list[float | None] = []
    for prompt, completion, right, facts in zip(prompts, completions, answer, metadata, strict=True):
        text = text_of(completion)
        tagged = extract(text)
        out.append(float(score(text.strip() if tagged is None else tagged, {"question": prompt, "answer": right, "metadata": facts})))
    return out


def _warm_up(*, dataset: str, dataset_options: Mapping[str, Any] | None = None, **_: Any) -> None:
    _scorer(dataset, json.dumps(dict(dataset_options or {}), sort_keys=True))


own_score.needs_answer = True  # type: ignore[attr-defined]
own_score.required_options = ("dataset",)  # type: ignore[attr-defined]
own_score.warm_up = _warm_up  # type: ignore[attr-defined]
