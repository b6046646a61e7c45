"""An experiment file: base recipe, axes, seeds, warm starts and how to compare; and the grid of runs it stands for.

recipe = "tiny"
seeds = [0, 1, {seed = 2, model.path = "second"}]

[base]
train.steps = 128

[[axis]]
name = "method"
values = [
  {label = "GRPO", set = {method.name = "grpo"}},
  {label = "GSPO wide", set = {method.name = "gspo", method.clip_low = 1.5e-2, method.clip_high = 2e-2}},
]

[[axis]]
key = "train.lr"
values = [1e-4, 3e-4]

[[warm_start]]
name = "second"
seed = 7
"""

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nearpolicy.check import build_method, refuse
from nearpolicy.config import Config, known_keys
from nearpolicy.config_base import MOST_UPDATES, Flag, Real, Whole
from nearpolicy.errors import UsageError, nearest
from nearpolicy.layers import find_recipe, layers, read_toml, recipe_names, resolve, to_toml, to_tree

MOST_CELLS = 10_000
"""Cells of a grid that is started without asking."""
SWEEP_DEFAULTS: dict[str, Any] = {
    "threads": 1, "log": {"rollouts_every": 0}, "checkpoint": {"every": MOST_UPDATES, "keep": 1},
}  # fmt: skip
"""Lie between recipe and `[base]`: one torch thread a run, no recorded responses, no checkpoint but the last."""


Statistic = Literal["final", "best", "auc", "drop", "equal_updates", "equal_tokens"]
"""Numbers of a cell that get an interval; compare.py says what they are."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)


class AxisValue(_Section):
    """A value of an axis that sets several keys at once."""

    label: str = Field(min_length=1)
    """Names it in tables and figures."""
    set: dict[str, Any]
    """Settings, nested or with dotted keys."""


class Axis(_Section):
    """One axis of the grid."""

    name: str = ""
    """Names it in tables and figures; empty takes the last word of `key`."""
    key: str = ""
    """The configuration key that plain values set; `model.path` takes a warm start's name too."""
    values: tuple[Any, ...]
    """Plain values of `key`, or tables with a `label` and the settings to `set`."""


class WarmStart(_Section):
    """A model made once, before the runs that start from it, by `nearpolicy sft`."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """What `model.path` says to start from it."""
    seed: Whole = Field(0, ge=0, le=2**63 - 1)
    """Seed of its initial weights and demonstrations."""
    from_scratch: Flag = True
    """Start from random weights of the tiny architecture; false starts from the recipe's `model.path`."""
    steps: Whole | None = Field(None, ge=1, le=MOST_UPDATES)
    """Updates; None takes those of `nearpolicy sft`."""
    lr: Real | None = Field(None, gt=0)
    """Peak learning rate; None takes that of `nearpolicy sft`."""
    batch_size: Whole | None = Field(None, ge=1, le=65_536)
    """Demonstrations in an update; None takes that of `nearpolicy sft`."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings on top of recipe and `[base]`."""
    gate: tuple[Real, Real] | None = None
    """Its held-out pass@1 must lie within; None takes any."""


class Compare(_Section):
    """How the runs are compared."""

    metric: str = Field("eval/pass@1", pattern=r"^eval/(pass|avg)@[1-9]\d*$")
    """The held-out score: `eval/pass@k` or `eval/avg@n`."""
    baseline: dict[str, str] = Field(default_factory=dict)
    """Axis -> label: every cell is compared with the cell that has these labels instead of its own. Empty = no differences."""
    target: Real = 0.8
    """The score of "updates to reach"."""
    collapse: Real = Field(0.7, gt=0, le=1)
    """A run has collapsed when its last evaluation is below this share of its best."""
    level: Real = Field(0.95, gt=0, lt=1)
    """Coverage of the intervals."""
    resamples: Whole = Field(2000, ge=100, le=1_000_000)
    """Bootstrap resamples."""


class Figures(_Section):
    """Which axis is drawn how; empty takes the axes in their order."""

    lines: str = ""
    """Axis told apart by colour."""
    columns: str = ""
    """Axis of the panels from left to right, and the x axis of the summary figure."""
    rows: str = ""
    """Axis of the panels from top to bottom."""


class Expect(_Section):
    """A range that a number of this experiment is expected in; the sweep ends with exit code 1 when one does not hold."""

    cell: dict[str, str] = Field(default_factory=dict)
    """Axis -> label, every axis."""
    minus: dict[str, str] = Field(default_factory=dict)
    """Axis -> label, those that differ: the number is `cell` minus this cell, over the seeds both have. Empty = the number of `cell`."""
    statistic: Statistic = "final"
    """Which number."""
    within: tuple[Real, Real]
    """Lowest and highest mean that is expected."""


class Experiment(_Section):
    """An experiment file."""

    name: str = ""
    """Names it and its directory; empty takes the file's."""
    recipe: str | tuple[str, ...] = "tiny"
    """Recipe or TOML file, or several that layer; a file is looked for beside the experiment first."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Settings of every run, on top of the recipe."""
    seeds: tuple[Any, ...] = (0, 1, 2)
    """Whole numbers, or tables with `seed` and settings that go with it, such as `model.path`."""
    axis: tuple[Axis, ...] = ()
    """The axes; the grid is their product."""
    warm_start: tuple[WarmStart, ...] = ()
    """Models made before the runs."""
    keep_checkpoints: Flag = False
    """Keep the checkpoints of finished runs; false deletes them."""
    compare: Compare = Compare()
    """How the runs are compared."""
    figures: Figures = Figures()
    """How they are drawn."""
    expect: tuple[Expect, ...] = ()
    """What its numbers are expected to be."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid."""

    labels: tuple[str, ...]
    """One of each axis."""
    name: str
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of the sweep."""

    name: str
    """Of its directory."""
    cell: Cell
    seed: int
    group: str
    """The settings that go with the seed, as text; empty when there are none."""
    config: Config
    """`model.path` names a warm start, where it starts from one."""
    config_hash: str
    """First 16 hexadecimal digits of the SHA-256 of the resolved configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sweep runs."""

    name: str
    experiment: Experiment
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    runs: tuple[PlannedRun, ...]
    warm_configs: dict[str, Config]
    """Warm start -> the configuration its supervised training runs with."""
    warnings: tuple[str, ...]

    def warm_start(self, run: PlannedRun) -> str | None:
        """The warm start that a run begins from, if the sweep makes it."""
        path = run.config.model.path
        return path if path in self.warm_configs else None


def read_experiment(path: Path) -> Experiment:
    """Parse an experiment file. Raises UsageError naming the key that is wrong."""
    try:
        found = Experiment.model_validate(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(p) for p in first["loc"])
        known = [*Experiment.model_fields, *(f"{s}.{k}" for s, m in _SECTIONS.items() for k in m.model_fields)]
        hint = nearest(re.sub(r"\.\d+", "", key), known)
        raise UsageError(f"{path}: {key}", got=repr(first["input"])[:80], expected=first["msg"].removeprefix("Value error, "), do=hint) from None
    return found if found.name else found.model_copy(update={"name": path.stem})


_SECTIONS: dict[str, type[BaseModel]] = {"axis": Axis, "warm_start": WarmStart, "compare": Compare, "figures": Figures, "expect": Expect}


def make_plan(experiment: Experiment, *, where: Path | None = None, many: bool = False) -> Plan:
    """Expand the grid and check every run, before anything is started.

    Args:
        where: folder of the experiment file; recipes that are files are looked for there first.
        many: allow more than `MOST_CELLS` cells.
    Raises:
        UsageError: an axis, seed or `[base]` that names no configuration key; a grid of 0 cells or more than `MOST_CELLS`; two cells that
            resolve to the same run; a run that `nearpolicy train` would refuse; a comparison that names what is not there.
    """
    axes = tuple(_axis(a, experiment) for a in experiment.axis)
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise UsageError("axis", got=f"two named {next(n for n in names if names.count(n) > 1)!r}", expected="different names", do="Set `name`.")
    seeds = [_seed(entry) for entry in experiment.seeds]
    size = math.prod(len(values) for _, values in axes)
    if size * len(seeds) == 0:
        empty = [n for n, values in axes if not values] or ["seeds"]
        raise UsageError("grid", got=f"0 cells ({', '.join(empty)} has no values)", expected="at least one run", do="Give it values.")
    if size > MOST_CELLS and not many:
        raise UsageError("grid", got=f"{size:,} cells", expected=f"at most {MOST_CELLS:,}", do="Take values out of the axes, or say --yes.")
    _check_names(experiment, axes)
    base = [*_recipe(experiment.recipe, where), SWEEP_DEFAULTS, _nested(experiment.base, "base")]
    warm = {w.name: resolve([*base, _nested(w.set, f"warm_start {w.name}"), {"seed": w.seed}]) for w in experiment.warm_start}
    cells, runs, warnings = [], [], list[str]()
    for picks in itertools.product(*(values for _, values in axes)):
        labels = tuple(label for label, _ in picks)
        cell = Cell(labels, ", ".join(f"{n}={label}" for n, label in zip(names, labels, strict=True)) or experiment.name)
        cells.append(cell)
        for seed, group, settings in seeds:
            config, effective = _configure([*base, *(tree for _, tree in picks), settings, {"seed": seed}], cell, experiment, warnings)
            digest = hashlib.sha256(to_toml(effective).encode()).hexdigest()[:16]
            runs.append(PlannedRun(name=_slug(cell, seed, group), cell=cell, seed=seed, group=group, config=config, config_hash=digest))
    runs = _distinct(runs)
    return Plan(name=experiment.name, experiment=experiment, axes=tuple(names), cells=tuple(cells), runs=tuple(runs), warm_configs=warm,
                warnings=tuple(dict.fromkeys(warnings)))  # fmt: skip


Values = list[tuple[str, dict[str, Any]]]


def _axis(axis: Axis, experiment: Experiment) -> tuple[str, Values]:
    """(name, [(label, settings)])."""
    name = axis.name or axis.key.rpartition(".")[2]
    if not name:
        raise UsageError("axis", got="neither name nor key", expected="a key, or a name and values that set keys", do="Give it `name` or `key`.")
    values: Values = []
    for value in axis.values:
        if isinstance(value, Mapping):
            try:
                bundle = AxisValue.model_validate(value)
            except ValidationError as error:
                first = error.errors()[0]
                raise UsageError(f"axis {name!r}", got=f"{value!r}"[:80], expected="a table with `label` and `set`", do=first["msg"] + ".") from None
            values.append((bundle.label, _nested(bundle.set, f"axis {name!r}")))
        else:
            if not axis.key:
                raise UsageError(f"axis {name!r}", got=f"the plain value {value!r}", expected="a `key` that it sets", do="Give the axis a `key`.")
            values.append((f"{value:g}" if isinstance(value, float) else str(value), _nested({axis.key: value}, f"axis {name!r}")))
    labels = [label for label, _ in values]
    if len(set(labels)) < len(labels):
        twice = next(x for x in labels if labels.count(x) > 1)
        raise UsageError(f"axis {name!r}", got=f"two values named {twice!r}", expected="different values", do="Take one out.")
    return name, values


def _seed(entry: Any) -> tuple[int, str, dict[str, Any]]:
    """(seed, group, settings)."""
    tree = dict(entry) if isinstance(entry, Mapping) else {"seed": entry}
    seed = tree.pop("seed", None)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UsageError("seeds", got=repr(entry)[:80], expected="whole numbers from 0, or tables with `seed`", do="Correct that entry.")
    settings = _nested(tree, "seeds")
    return seed, ", ".join(str(v) for _, v in _flat(settings)), settings


def _nested(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Dotted keys become tables; every key must be one of the configuration."""
    known = _known()
    out: dict[str, Any] = {}
    for key, value in _flat(tree):
        if key == "seed" or not _is_known(key, known):
            hint = "Seeds are listed under `seeds`." if key == "seed" else nearest(key, known)
            raise UsageError(where, got=f"{key!r}, which is no configuration key that it can set", expected="a key such as train.lr", do=hint)
        place = out
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return out


@cache
def _known() -> list[str]:
    return known_keys()


def _is_known(key: str, known: Sequence[str]) -> bool:
    """A leaf, a section, an option of a method (checked by its row), or a part of a leaf that is a table."""
    return key.startswith("method.") or any(k == key or k.startswith(f"{key}.") or key.startswith(f"{k}.") for k in known)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_names(experiment: Experiment, axes: Sequence[tuple[str, Values]]) -> None:
    """What `[compare]` and `[figures]` name must be there."""
    known = {name: [label for label, _ in values] for name, values in axes}
    f = experiment.figures
    for where, name in [*((f"figures.{k}", getattr(f, k)) for k in ("lines", "columns", "rows")), *(("compare.baseline", n)
                        for n in experiment.compare.baseline)]:  # fmt: skip
        if name and name not in known:
            raise UsageError(where, got=repr(name), expected="the name of an axis", do=nearest(name, known))
    for name, label in experiment.compare.baseline.items():
        if label not in known[name]:
            raise UsageError(f"compare.baseline.{name}", got=repr(label), expected="a label of that axis", do=nearest(label, known[name]))
    for e in experiment.expect:
        _check_expect(e, known)
    warm = [w.name for w in experiment.warm_start]
    for name in warm:
        if warm.count(name) > 1 or name in ("tiny", "smollm2"):
            raise UsageError("warm_start", got=f"the name {name!r}", expected="names of their own", do="Rename it.")


def _check_expect(e: Expect, known: Mapping[str, Sequence[str]]) -> None:
    """It names one cell, and another one if it is a difference."""
    for key, labels in (("cell", e.cell), ("minus", e.minus)):
        for name, label in labels.items():
            if name not in known:
                raise UsageError(f"expect.{key}", got=repr(name), expected="the name of an axis", do=nearest(name, known))
            if label not in known[name]:
                raise UsageError(f"expect.{key}.{name}", got=repr(label), expected="a label of that axis", do=nearest(label, known[name]))
    if missing := [name for name in known if name not in e.cell]:
        raise UsageError("expect.cell", got=f"no label of {missing[0]!r}", expected="a label of every axis", do=f"Add {missing[0]} = a label of it.")
    if e.minus and all(e.cell[name] == label for name, label in e.minus.items()):
        raise UsageError("expect.minus", got="the cell itself", expected="another cell", do="Name the labels that differ.")
    if not e.within[0] <= e.within[1]:
        raise UsageError("expect.within", got=list(e.within), expected="lowest, highest", do="Put the lower end first.")


def _recipe(recipe: str | tuple[str, ...], where: Path | None) -> list[dict[str, Any]]:
    parts = [recipe] if isinstance(recipe, str) else list(recipe)
    found = []
    for part in parts:
        beside = (where or Path()) / part
        found.append(str(beside) if part not in recipe_names() and beside.suffix == ".toml" and beside.exists() else str(find_recipe(part)))
    return layers(found)


def _configure(trees: Sequence[Mapping[str, Any]], cell: Cell, experiment: Experiment, warnings: list[str]) -> tuple[Config, dict[str, Any]]:
    """The run's configuration, and its tree with every option of the method: two runs are the same when these are."""
    try:
        config = resolve(trees)
        method = build_method(config)
        warnings += refuse(config, method)
        e, metric = config.eval, experiment.compare.metric.removeprefix("eval/")
        offered = [*(f"pass@{k}" for k in e.k), f"avg@{e.samples}"] if config.task.heldout else []
        if metric not in offered:
            raise UsageError("compare.metric", got=f"eval/{metric}", expected=f"one that the runs measure: {', '.join(offered) or 'none'}",
                             do="Set eval.k, eval.samples and task.heldout, or another metric.")  # fmt: skip
    except UsageError as error:
        raise UsageError(f"cell {cell.name}: {error.what}", got=error.got, expected=error.expected, do=error.do) from None
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in method.options.items() if v is not None}
    return config, to_tree(config) | {"method": {"name": method.name} | options}


def _slug(cell: Cell, seed: int, group: str) -> str:
    words = [*cell.labels, *([Path(group).name] if group else [])]
    return "_".join([*(re.sub(r"[^A-Za-z0-9.+-]+", "-", w)[:40] for w in words), f"s{seed}"])


def _distinct(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs, with a digest in the names that would collide. Raises UsageError on two that resolve to the same run."""
    by_hash: dict[str, PlannedRun] = {}
    for run in runs:
        if (other := by_hash.setdefault(run.config_hash, run)) is not run:
            a, b = (f"{r.cell.name} seed {r.seed}{f' ({r.group})' if r.group else ''}" for r in (other, run))
            raise UsageError("grid", got=f"two cells that resolve to the same run: {a} and {b}", expected="different runs",
                             do="Take one out, or look for a key that a later axis sets again.")  # fmt: skip
    count = Counter(r.name for r in runs)
    return [replace(r, name=f"{r.name}_{r.config_hash[:6]}") if count[r.name] > 1 else r for r in runs]
