"""Reward functions by name: what a reward is made of, and how its functions are found.

A reward function has TRL's signature, `f(prompts, completions, **columns) -> list of float or None`, called by keyword; None abstains.
It is named by an import path, `package.module:function` or `path/to/file.py:function`, or by a short name of `VERIFIERS`. Reward workers
import this module: standard library only.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from nearpolicy.errors import UsageError, nearest
from nearpolicy.tasks.process import START_TIMEOUT_S, probe

VERIFIERS: dict[str, str] = {
    "exact": "nearpolicy.tasks.verifiers:exact",
    "number": "nearpolicy.tasks.verifiers:number",
    "math_verify": "nearpolicy.tasks.verifiers:math_verify",
    "reasoning_gym": "nearpolicy.tasks.reasoning_gym:own_score",
    "arithmetic": "nearpolicy.tasks.arithmetic:arithmetic",
    "code": "nearpolicy.tasks.code:code",
}
"""Short names of the verifiers that come with the package."""

RewardFunction = Callable[..., Any]
_GIVEN = ("prompts", "completions")
_OWN = __name__.partition(".")[0] + "."


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """What a reward function says of itself."""

    needs_answer: bool
    """It reads the column `answer` (its attribute `needs_answer`)."""
    takes: tuple[str, ...] | None
    """The options it takes; None is any."""
    requires: tuple[str, ...] = ()
    """Options it cannot do without (its attribute `required_options`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function and its weight.

    Raises:
        UsageError: an unknown short name, a weight that is not finite, or options named prompts or completions.
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
        for option in _GIVEN:
            if option in self.options:
                raise UsageError(f"Options of reward {self.function!r}", got=repr(option), expected="options of the function",
                                 do=f"Take it out: every function is given the {option}.")  # fmt: skip
        if not self.name:
            object.__setattr__(self, "name", self.path.rpartition(":")[2] if ":" in self.function else self.function)

    @property
    def path(self) -> str:
        """The import path, short names resolved."""
        return VERIFIERS.get(self.function, self.function)

    @property
    def comes_with_the_package(self) -> bool:
        """True for functions of this package, which may be imported outside a worker."""
        return self.path.startswith(_OWN) and not self.path.rpartition(":")[0].endswith(".py")

    def check_options(self, facts: FunctionFacts) -> None:
        """Refuse options that the function does not take, or the lack of one it needs.

        Raises:
            UsageError: naming the option.
        """
        for option in self.options:
            if facts.takes is not None and option not in facts.takes:
                raise UsageError(f"Option of reward {self.function!r}", got=repr(option), expected="an option that it takes",
                                 do=nearest(option, facts.takes) if facts.takes else "It takes none: remove it.")  # fmt: skip
        for option in facts.requires:
            if option not in self.options:
                raise UsageError(f"Reward {self.function!r}", got=f"no option {option!r}", expected=f"{option} among its options",
                                 do=f"Add options = {{{option} = ...}}, or leave the reward to the task that sets it.")  # fmt: skip


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

    def functions(self, *, timeout_s: float = START_TIMEOUT_S) -> list[FunctionFacts]:
        """What is to know of each function; options are checked. A start-up check, and safe: only functions of this package are imported
        here, the others in a process of their own (once for each state of a file).

        Args:
            timeout_s: seconds that importing may take in that process.
        Raises:
            UsageError: one cannot be imported (it raises, hangs or exits), does not exist, cannot be called, or does not take its options.
        """
        foreign = tuple(r.path for r in self.rewards if not r.comes_with_the_package)
        found = iter(_probed(foreign, tuple(map(_stamp, foreign)), os.getcwd(), tuple(sys.path), timeout_s) if foreign else ())
        facts = [facts_of(load_function(r.path)) if r.comes_with_the_package else next(found) for r in self.rewards]
        for reward, one in zip(self.rewards, facts, strict=True):
            reward.check_options(one)
        return facts

    @property
    def needs_answer(self) -> bool:
        """True when some function says (by an attribute `needs_answer`) that it reads the column `answer`.

        Raises:
            UsageError: as `functions`.
        """
        return any(facts.needs_answer and "answer" not in r.options for facts, r in zip(self.functions(), self.rewards, strict=True))


@functools.lru_cache(maxsize=64)
def _probed(paths: tuple[str, ...], stamps: tuple[object, ...], cwd: str, path: tuple[str, ...], timeout_s: float) -> tuple[FunctionFacts, ...]:
    """All arguments but the first and last only tell one state of the world from another. Failures are not kept."""
    return tuple(
        FunctionFacts(needs_answer=f["needs_answer"], takes=None if f["takes"] is None else tuple(f["takes"]), requires=tuple(f["requires"]))
        for f in probe(paths, timeout_s)
    )


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path.rpartition(":")[0]).expanduser().stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def facts_of(function: RewardFunction) -> FunctionFacts:
    """What a reward function says of itself: its attributes, and the keywords in its signature.

    `**kwargs` takes any option, except in the functions of this package: theirs is for columns that they do not read.
    """
    takes: tuple[str, ...] | None = None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = None
    if parameters is not None:
        own = str(getattr(function, "__module__", "")).startswith(_OWN)
        if own or not any(p.kind is p.VAR_KEYWORD for p in parameters):
            takes = tuple(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in _GIVEN)
    requires = tuple(str(name) for name in getattr(function, "required_options", ()))
    return FunctionFacts(needs_answer=bool(getattr(function, "needs_answer", False)), takes=takes, requires=requires)


def load_function(path: str, what: str = "Reward function") -> RewardFunction:
    """The function at `package.module:function` or `path/to/file.py:function`.

    A file is run once a process; its folder joins the import path, as when it is run as a script.

    Args:
        what: names it in error messages.
    Raises:
        UsageError: it cannot be imported (whatever the import raised), is not there, or cannot be called.
    """
    where, _, attribute = path.rpartition(":")
    if not where or not attribute:
        raise UsageError(what, got=repr(path), expected="package.module:function or path/to/file.py:function", do="Name both parts.")
    try:
        module = _file_module(Path(where), what) if where.endswith(".py") else importlib.import_module(where)
    except UsageError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(f"{what} {path!r}", got=f"{type(error).__name__}: {error} while importing {where}",
                         expected="a module that can be imported", do="Mend or install it, or correct the path.") from error  # fmt: skip
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
            raise UsageError(f"{what} {path!r}", got=f"no {attribute!r} in {where}", expected="a function defined there",
                             do=nearest(attribute, known) if known else "It defines no function.")  # fmt: skip
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{what} {path!r}", got=f"a {type(found).__name__}", expected="something that can be called",
                         do="Name a function.")  # fmt: skip
    return found


def _file_module(path: Path, what: str) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise UsageError(what, got=f"{path}, which is no file", expected="a Python file", do="Correct the path.")
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
