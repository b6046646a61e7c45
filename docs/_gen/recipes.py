"""The page of recipes, from the files themselves."""

from nearpolicy import layers
from nearpolicy.build import build_method, config_for
from nearpolicy.config import Config

GENERATED = "<!-- Written by docs/generate.py from nearpolicy/recipes: edit the files there. -->"
HEAD = """A recipe is a TOML file that ships with the package and goes by its name. Everything that it does not say has the
[default](reference/configuration.md); words after
it replace what it says.

```console
$ nearpolicy recipes
$ nearpolicy check tiny train.lr=1e-4
$ nearpolicy train tiny train.lr=1e-4 --out runs/mine
```
"""
PAPERS = """The settings of the papers at their scale. **None of these was run by us**: they say what a paper printed, and in comments at their
head what it left open and what
we put there. Give them your own data (`task.path`, and `task.heldout_path` where they name one) and models.

`nearpolicy check` works on them anywhere: a model that is a repository of the hub and not in the local cache is named as not checked, with its
data if they
are missing too, and everything else is checked.

```console
$ nearpolicy check papers/vespo-qwen3-8b
$ nearpolicy check papers/iw-opd-qwen3-4b-from-30b-a3b
```
"""


def pages() -> dict[str, str]:
    """Path below docs/ -> text."""
    names = layers.recipe_names()
    own, papers = [n for n in names if "/" not in n], [n for n in names if "/" in n]
    lines = ["# Recipes", GENERATED, "", HEAD, "## Made to run", "", "| recipe | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {_first_line(name)} |" for name in own]
    lines += ["", *_table(own), "", "## Papers at their scale", "", PAPERS, *_table(papers), ""]
    return {"recipes.md": "\n".join(lines)}


def _first_line(name: str) -> str:
    first = (layers.RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ").replace("|", "\\|")


def _table(names: list[str]) -> list[str]:
    head = ("recipe", "model", "teacher", "method", "rollout batch", "schedule", "prompt / response", "lr", "updates")
    rows = [_row(name, config_for([name])) for name in names]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _row(name: str, c: Config) -> list[str]:
    r = c.rollout
    method = build_method(c).name
    source = f"relay, T = {r.refresh}" if r.source == "relay" else ""
    return [
        f"`{name}`", c.model.path, c.teacher.path if c.teacher is not None and c.teacher.path else "–", f"[{method}](methods/{method}.md)",
        f"{r.prompts:,} x {r.group_size}" + (f" ({source})" if source else ""), _schedule(c), f"{c.task.max_prompt_tokens:,} / {r.max_tokens:,}",
        f"{c.train.lr:g}", f"{c.train.steps:,}",
    ]  # fmt: skip


def _schedule(c: Config) -> str:
    s = c.schedule
    return f"N = {s.updates_per_rollout}" if s.kind == "sync" else f"async, K = {s.sync_every}"
