"""Models and data that a configuration names and that lie elsewhere: what `check` then says in place of what it cannot read."""

from collections.abc import Callable
from pathlib import Path

from nearpolicy.check_teacher import build_mixture, reads_reference, scoring_models
from nearpolicy.config import CodeTask, Config, RowsTask
from nearpolicy.methods import Method


def models_away(config: Config, chosen: Method, folder: Callable[[str], Path]) -> dict[str, str]:
    """Key -> repository name of every model that is to come from the hub and is not in the local cache.

    A name is a repository's when it reads `owner/name` and there is neither such a folder nor a folder `owner`; any other path that leads nowhere
    is a mistake, which whoever reads it refuses.
    """
    named: dict[str, str | None] = {"model.path": config.model.path}
    named |= {f"{key}.path": scorer.path for key, scorer in scoring_models(config).items()}
    if reads_reference(config, chosen, build_mixture(config)):
        named["reference.path"] = config.reference.path
    return {key: path for key, path in named.items() if path is not None and _is_repository(path) and not folder(path).exists()}


def data_away(config: Config) -> dict[str, str]:
    """Key -> path of the files of rows that are not here."""
    t = config.task
    if not isinstance(t, RowsTask | CodeTask) or (isinstance(t, CodeTask) and t.path == type(t).model_fields["path"].default):
        return {}
    named = {"task.path": t.path, "task.heldout_path": t.heldout_path}
    return {key: path for key, path in named.items() if path is not None and not Path(path).exists()}


def unchecked(models: dict[str, str], data: dict[str, str]) -> list[str]:
    """One line for each thing that is not here."""
    said = [f"not checked: {key} = {path} is not on this machine (hf download {path}): vocabulary, prompts, memory" for key, path in models.items()]
    return said + [f"not checked: {key} = {path} is not on this machine: columns and rows" for key, path in data.items()]


def _is_repository(path: str) -> bool:
    owner, slash, name = path.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner[0] not in ".~" and not Path(owner).exists()
