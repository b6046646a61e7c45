"""The embedded task: a labelled chain of modular arithmetic with a scratchpad.

A prompt is a start digit and `num_ops` labelled operations, all modulo `modulus`:

    3a+4b*2c-0d*3=      state: 3 -> a: 3+4=2 -> b: 2*2=4 -> c: 4-0=4 -> d: 4*3=2

A solution writes one step for each operation and then the answer, in one of two styles:

    long    a+43=2b*22=4c-04=4d*34=2#2      label, op, operand, state before, "=", state after
    short   a+42b*24c-04d*32#2              label, op, operand, state after

The labels let a small model look up its operation by content. Operands of `*` are units modulo `modulus`, so every step is a bijection
of the state: an error in any step changes the answer unless a later error undoes it.

Demonstrations for supervised training are noisy: each step is off by +1 with a fixed probability and the error is carried on. A model
trained on them is *noise-limited*: greedy decoding is nearly always right, sampling at temperature 1 is right 20-50 % of the time, and
reinforcement learning has something to sharpen.

The strategic variant (`strategies=(w_0, w_1, ...)`) puts the choice that matters first: the response opens with a strategy digit s, the
chain starts from start + s, and the answer is that of a hidden strategy, a keyed hash of the prompt with the given weights.
Demonstrations choose s uniformly.

This module is imported by reward workers: numpy and the standard library only.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nearpolicy.errors import DataError, UsageError
from nearpolicy.randomness import generator
from nearpolicy.tasks.rows import RewardSpec, Row
from nearpolicy.tasks.verifiers import needs_answer

LABELS = "abcdefghijklmn"
OPERATORS = "+-*"
ANSWER_MARK = "#"
ALPHABET = "0123456789" + OPERATORS + "=" + ANSWER_MARK + LABELS
"""Every character of a prompt or solution."""

_HELDOUT_ONE_IN = 8
_MAX_DRAWS = 10_000
_PROMPT = re.compile(r"(\d)((?:[a-n][+*-]\d)+)=")


class Noise(NamedTuple):
    """Probability that a demonstrated step is off by +1, by style."""

    long: float
    short: float


PLAIN_NOISE = Noise(long=0.09, short=0.12)
STRATEGIC_NOISE = Noise(long=0.06, short=0.08)
STRATEGY_WEIGHTS = (0.6, 0.3, 0.1)
"""How often each hidden strategy is the right one."""


class Operation(NamedTuple):
    """One labelled operation of a prompt."""

    label: str
    operator: str
    operand: int

    def __call__(self, state: int, modulus: int) -> int:
        """The state after this operation."""
        value = {"+": state + self.operand, "-": state - self.operand, "*": state * self.operand}[self.operator]
        return value % modulus


def parse(prompt: str) -> tuple[int, list[Operation]]:
    """Start digit and operations of a prompt.

    Raises:
        DataError: `prompt` is not a chain.
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise DataError("Arithmetic prompt", got=repr(prompt), expected="a chain like '3a+4b*2='", do="Use rows of the arithmetic task.")
    body = match[2]
    return int(match[1]), [Operation(body[i], body[i + 1], int(body[i + 2])) for i in range(0, len(body), 3)]


def is_heldout(prompt: str) -> bool:
    """True for one prompt in eight, by a hash of its text alone: no seed's training prompts meet any seed's held-out prompts."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8, person=b"heldout").digest()) % _HELDOUT_ONE_IN == 0


@needs_answer
def arithmetic(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **columns: object) -> list[float | None]:
    """1.0 where the completion ends in the answer mark and the right digit (`...#2`) and has one mark only, else 0.0.

    The signature is TRL's: lists of equal length, one value a completion. The scratchpad is not judged.
    """
    return [float(text.count(ANSWER_MARK) == 1 and text.endswith(ANSWER_MARK + str(right))) for text, right in zip(completions, answer, strict=True)]


class ArithmeticRows:
    """Prompts of one split, each a function of (seed, split, i)."""

    def __init__(self, task: "ArithmeticTask", split: str, size: int | None) -> None:
        self._task, self._split, self.size = task, split, size
        self._heldout = split == "heldout"

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError(f"the {self._split} split is endless: it has no length")
        return self.size

    def row(self, i: int) -> Row:
        """Row i, i >= 0.

        Raises:
            IndexError: outside the split.
            UsageError: the chain is so short that the split has no prompts to find.
        """
        if i < 0 or (self.size is not None and i >= self.size):
            raise IndexError(f"row {i} of {'an endless' if self.size is None else f'a {self.size}-row'} split")
        draw = generator(self._task.seed, "arithmetic", self._split, i)
        for _ in range(_MAX_DRAWS):
            prompt = self._task.draw_prompt(draw)
            if is_heldout(prompt) == self._heldout:
                return Row(id=f"arithmetic-{self._split}-{i}", prompt=prompt, columns={"answer": self._task.answer(prompt)})
        raise UsageError(
            "Arithmetic task", got=f"modulus {self._task.modulus}, num_ops {self._task.num_ops}", expected=f"some {self._split} prompts",
            do="Use more operations.",
        )  # fmt: skip


class ArithmeticTask:
    """Labelled arithmetic chains: endless training prompts, a fixed held-out set, noisy demonstrations.

    Args:
        modulus: 2 to 10. Prompts have `2 + 3 * num_ops` characters.
        num_ops: 1 to 14 operations. Long solutions have `6 * num_ops + 2` characters, short ones `4 * num_ops + 2`, one more with strategies.
        strategies: weights of the hidden strategies 0, 1, ... (at most `modulus` of them); a number takes that many of `STRATEGY_WEIGHTS`;
            None is the plain task.
        noise: error probability of a demonstrated step by style; None is `PLAIN_NOISE`, or `STRATEGIC_NOISE` with strategies.
        heldout: number of held-out prompts; 0 is none.
        seed: seed of prompts and demonstrations.
    Raises:
        UsageError: a value outside these bounds.
    """

    def __init__(
        self,
        *,
        modulus: int = 5,
        num_ops: int = 8,
        strategies: int | Sequence[float] | None = None,
        noise: tuple[float, float] | None = None,
        heldout: int = 512,
        seed: int = 0,
    ) -> None:
        _require("modulus", modulus, 2 <= modulus <= 10, "2 to 10")
        _require("num_ops", num_ops, 1 <= num_ops <= len(LABELS), f"1 to {len(LABELS)}")
        _require("heldout", heldout, heldout >= 0, "at least 0")
        if isinstance(strategies, int):
            _require("strategies", strategies, 2 <= strategies <= len(STRATEGY_WEIGHTS), f"2 to {len(STRATEGY_WEIGHTS)}, or weights")
            strategies = STRATEGY_WEIGHTS[:strategies]
        if strategies is not None:
            good = 2 <= len(strategies) <= modulus and all(math.isfinite(w) and w >= 0 for w in strategies) and sum(strategies) > 0
            _require("strategies", strategies, good, f"2 to {modulus} weights >= 0, one for each strategy")
        if noise is not None:
            _require("noise", noise, len(noise) == 2 and all(0 <= p < 1 for p in noise), "two probabilities (long, short) in [0, 1)")
        self.modulus, self.num_ops, self.seed = modulus, num_ops, seed
        self.strategies = None if strategies is None else tuple(w / sum(strategies) for w in strategies)
        self.noise = Noise(*noise) if noise is not None else (PLAIN_NOISE if strategies is None else STRATEGIC_NOISE)
        self.train = ArithmeticRows(self, "train", None)
        self.heldout = ArithmeticRows(self, "heldout", heldout)
        self._units = [k for k in range(1, modulus) if math.gcd(k, modulus) == 1]

    @property
    def reward(self) -> RewardSpec:
        """The default reward: `arithmetic`."""
        return RewardSpec.single("nearpolicy.tasks.arithmetic:arithmetic")

    @property
    def max_tokens(self) -> int:
        """Longest solution in characters, the end-of-sequence token included."""
        return 6 * self.num_ops + 3 + (self.strategies is not None)

    def draw_prompt(self, draw: np.random.Generator) -> str:
        """A prompt from this generator; both splits' prompts come from this distribution."""
        start = int(draw.integers(self.modulus))
        kinds = draw.integers(len(OPERATORS), size=self.num_ops).tolist()
        operands = draw.integers(self.modulus, size=self.num_ops).tolist()
        units = draw.integers(len(self._units), size=self.num_ops).tolist()
        steps = (
            f"{label}{OPERATORS[kind]}{self._units[unit] if OPERATORS[kind] == '*' else operand}"
            for label, kind, operand, unit in zip(LABELS, kinds, operands, units, strict=False)
        )
        return f"{start}{''.join(steps)}="

    def hidden_strategy(self, prompt: str) -> int:
        """The strategy that the answer follows: a hash of the prompt with the given weights; 0 in the plain task."""
        if self.strategies is None:
            return 0
        digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"strategy").digest()
        point = int.from_bytes(digest) / 2**64
        return min(int(np.searchsorted(np.cumsum(self.strategies), point, side="right")), len(self.strategies) - 1)

    def answer(self, prompt: str) -> str:
        """The right final digit."""
        start, operations = parse(prompt)
        state = (start + self.hidden_strategy(prompt)) % self.modulus
        for operation in operations:
            state = operation(state, self.modulus)
        return str(state)

    def demonstration(self, row: Row, index: int = 0) -> str:
        """A noisy solution of a row, a function of (seed, row id, index): style and strategy uniform, each step off by +1 with `noise`.

        Raises:
            DataError: the row's prompt is not a chain.
        """
        draw = generator(self.seed, "arithmetic", "demonstration", row.id, index)
        long = bool(draw.random() < 0.5)
        strategy = None if self.strategies is None else int(draw.integers(len(self.strategies)))
        errors = draw.random(self.num_ops) < (self.noise.long if long else self.noise.short)
        return self.solution(str(row.prompt), long=long, strategy=strategy, errors=errors.tolist())

    def solution(self, prompt: str, *, long: bool = True, strategy: int | None = None, errors: Sequence[bool] | None = None) -> str:
        """The written-out solution of a prompt.

        Args:
            long: write the state before each step too.
            strategy: opening digit of the strategic variant; None for the plain task.
            errors: steps to get wrong by +1, the error carried on; None for a right solution.
        Raises:
            DataError: `prompt` is not a chain.
        """
        start, operations = parse(prompt)
        state = (start + (strategy or 0)) % self.modulus
        out = [] if strategy is None else [str(strategy)]
        for operation, wrong in zip(operations, errors or [False] * len(operations), strict=True):
            after = (operation(state, self.modulus) + wrong) % self.modulus
            step = f"{operation.label}{operation.operator}{operation.operand}"
            out.append(f"{step}{state}={after}" if long else f"{step}{after}")
            state = after
        return "".join(out) + f"{ANSWER_MARK}{state}"


def _require(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise UsageError(f"Arithmetic task: {name}", got=value, expected=expected, do=f"Set task.{name} within it.")
