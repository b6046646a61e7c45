"""Reward functions by name: what a reward is made of, and how its functions are found.

A reward function has TRL's signature, `f(prompts, completions, **columns) -> list of float or None`, called by keyword; None abstains.
It is named by an import path, `package.module:function` or `path/to/file.py:function`, or by a short name of `VERIFIERS`. Reward workers
import this module: standard library only.
"""

import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from nearpolicy.errors import UsageError, nearest

VERIFIERS: dict[str, str] = {
    "exact": "nearpolicy.tasks.verifiers:exact",
    "number": "nearpolicy.tasks.verifiers:number",
    "math_verify": "nearpolicy.tasks.verifiers:math_verify",
    "reasoning_gym": "nearpolicy.tasks.reasoning_gym:own_score",
    "arithmetic": "nearpolicy.tasks.arithmetic:arithmetic",
}
"""Short names of the verifiers that come with the package."""

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function and its weight.

    Raises:
        UsageError: an unknown short name, or a weight that is not finite.
    """

    function: str
    """Import path, or a name of `VERIFIERS`."""
    name: str = ""
    """Names its part of the score; empty takes the function's own name."""
    weight: float = 1.0
    """Its factor in the sum over the functions that did not abstain."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments handed to it at every call; they win over columns of the same name."""

    def __post_init__(self) -> None:
        if ":" not in self.function and self.function not in VERIFIERS:
            raise UsageError("Reward function", got=repr(self.function), expected="package.module:function, file.py:function or a known name",
                             do=nearest(self.function, VERIFIERS))  # fmt: skip
        if not math.isfinite(self.weight):
            raise UsageError(f"Weight of reward {self.function!r}", got=self.weight, expected="a finite number", do="Set its weight.")
        if not self.name:
            object.__setattr__(self, "name", self.path.rpartition(":")[2] if ":" in self.function else self.function)

    @property
    def path(self) -> str:
        """The import path, short names resolved."""
        return VERIFIERS.get(self.function, self.function)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The reward of a task: reward = sum_k weight_k * f_k over the functions k that did not abstain; no value when all of them did.

    Raises:
        UsageError: no function, or two of one name.
    """

    rewards: tuple[Reward, ...]

    def __post_init__(self) -> None:
        names = [r.name for r in self.rewards]
        if not names:
            raise UsageError("Reward", got="no function", expected="at least one", do="Name one, for example 'number'.")
        if len(set(names)) < len(names):
            raise UsageError("Reward", got=f"the names {', '.join(names)}", expected="a different name for each function",
                             do="Give them names of their own.")  # fmt: skip

    @classmethod
    def single(cls, function: str, **options: Any) -> "RewardSpec":
        """One function of weight 1, by import path or short name."""
        return cls((Reward(function=function, options=options),))

    def functions(self) -> list[RewardFunction]:
        """The functions, imported.

        Raises:
            UsageError: one cannot be imported, does not exist or cannot be called.
        """
        return [load_function(r.path) for r in self.rewards]

    @property
    def needs_answer(self) -> bool:
        """True when some function says (by an attribute `needs_answer`) that it reads the column `answer`.

        Raises:
            UsageError: as `functions`.
        """
        return any(getattr(f, "needs_answer", False) and "answer" not in r.options for f, r in zip(self.functions(), self.rewards, strict=True))


def load_function(path: str) -> RewardFunction:
    """The function at `package.module:function` or `path/to/file.py:function`.

    A file is run once a process; its folder joins the import path, as when it is run as a script.

    Raises:
        UsageError: it cannot be imported (whatever the import raised), is not there, or cannot be called.
    """
    where, _, attribute = path.rpartition(":")
    if not where or not attribute:
        raise UsageError("Reward function", got=repr(path), expected="package.module:function or path/to/file.py:function", do="Name both parts.")
    try:
        module = _file_module(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except UsageError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(f"Reward function {path!r}", got=f"{type(error).__name__}: {error} while importing {where}",
                         expected="a module that can be imported", do="Mend or install it, or correct the path.") from error  # fmt: skip
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
            raise UsageError(f"Reward function {path!r}", got=f"no {attribute!r} in {where}", expected="a function defined there",
                             do=nearest(attribute, known) if known else "It defines no function.")  # fmt: skip
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"Reward function {path!r}", got=f"a {type(found).__name__}", expected="something that can be called",
                         do="Name a function with the signature (prompts, completions, **columns).")  # fmt: skip
    return found


def _file_module(path: Path) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise UsageError("Reward function", got=f"{path}, which is no file", expected="a Python file", do="Correct the path.")
    name = f"_reward_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {file}")
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
