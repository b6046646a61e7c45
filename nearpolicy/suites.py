"""Evaluation suites: benchmarks by name, data file, columns, samples, k, temperature and top-p, in TOML.

[[benchmark]]
name = "aime24"
path = "data/aime24.jsonl"     # relative to the suite file
samples = 32
temperature = 1.0
top_p = 0.7
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nearpolicy.config import Config
from nearpolicy.config_base import Real, Whole
from nearpolicy.errors import UsageError, nearest
from nearpolicy.layers import read_toml, resolve

SUITES = Path(__file__).parent / "suites"


class Benchmark(BaseModel):
    """One benchmark of a suite."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    name: str
    """Names its numbers."""
    path: str
    """Rows: JSONL, Parquet or a data set folder; relative to the suite file, `~` is the home folder."""
    prompt_column: str | None = None
    """Column of the prompt; None looks for the usual ones."""
    answer_column: str | None = None
    """Column of the answer; None looks for the usual ones."""
    reward: str = "math_verify"
    """Reward function, as in `task.rewards`."""
    samples: Whole = Field(1, ge=1, le=65_536)
    """Responses to each prompt (n of avg@n)."""
    k: tuple[Whole, ...] = (1,)
    """The k of pass@k."""
    temperature: Real = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: Real = Field(1.0, gt=0, le=1)
    """Nucleus."""
    max_tokens: Whole | None = None
    """Longest response; None takes the configuration's."""
    system_prompt: str | None = None
    """Put in front of every prompt."""

    def configure(self, base: Mapping[str, Any], folder: Path, overrides: Mapping[str, Any]) -> Config:
        """A configuration that evaluates `folder` on this benchmark alone."""
        if not Path(self.path).exists():
            raise UsageError(f"benchmark {self.name!r}", got=f"no {self.path}", expected="its rows there", do="Put the data there or edit the suite.")
        task: dict[str, Any] = {"kind": "rows", "path": self.path, "heldout_path": self.path, "rewards": [{"function": self.reward}]}
        if self.reward == "code":
            task = {"kind": "code", "path": self.path, "heldout_path": self.path}
        named = {"prompt_column": self.prompt_column, "answer_column": self.answer_column, "system_prompt": self.system_prompt}
        task |= {k: v for k, v in named.items() if v is not None}
        evaluation = {"samples": self.samples, "k": list(self.k), "temperature": self.temperature, "top_p": self.top_p, **overrides}
        rollout = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        plain = {k: v for k, v in base.items() if k not in ("task", "eval")}
        return resolve([plain, {"model": {"path": str(folder)}, "task": task, "rollout": rollout, "eval": evaluation}])


def find_suite(suite: Path) -> Path:
    """A file, or the name of a suite that ships. Raises UsageError naming the nearest."""
    if suite.suffix == ".toml":
        return suite
    shipped = SUITES / f"{suite}.toml"
    if shipped.exists():
        return shipped
    raise UsageError(f"--suite {suite}", got="no such suite", expected="a .toml file or a shipped suite",
                     do=nearest(str(suite), [p.stem for p in SUITES.glob("*.toml")]))  # fmt: skip


def read_suite(path: Path) -> list[Benchmark]:
    """The benchmarks of a suite file, paths resolved. Raises UsageError naming what is wrong."""
    tree = read_toml(path)
    rows = tree.get("benchmark")
    if not isinstance(rows, list) or not rows or set(tree) != {"benchmark"}:
        raise UsageError(str(path), got=f"the keys {', '.join(tree) or 'none'}", expected="[[benchmark]] tables", do="See docs/evaluation.")
    out = []
    for i, row in enumerate(rows):
        try:
            benchmark = Benchmark.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(p) for p in first["loc"])
            raise UsageError(f"{path}: benchmark {i + 1}: {key}", got=repr(first["input"]), expected=first["msg"],
                             do=nearest(key, Benchmark.model_fields)) from None  # fmt: skip
        where = Path(benchmark.path).expanduser()
        out.append(benchmark.model_copy(update={"path": str(where if where.is_absolute() else path.parent / where)}))
    names = [b.name for b in out]
    if len(set(names)) < len(names):
        raise UsageError(str(path), got="two benchmarks of one name", expected="different names", do="Rename one.")
    return out
