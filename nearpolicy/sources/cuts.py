"""Where a stored response is cut: plain callables `(length, entropies, rng) -> tokens kept`, and the check of what they return.

Source: Thinking Seeds, arXiv 2601.21476 (`length_ratio` and `top_entropy`; the others are ours).
"""

from collections.abc import Callable
from numbers import Integral

import numpy as np

from nearpolicy.errors import DataError, EngineError, UsageError
from nearpolicy.objective.position import entropy_cuts, length_cut
from nearpolicy.rollout import Array

Cut = Callable[[int, Array | None, np.random.Generator], int]
"""(response length in tokens, entropy of each token's sampling distribution in nats or None, keyed generator) -> tokens kept, 0 to length."""


def length_ratio(ratio: float) -> Cut:
    """Keep round(length * ratio) tokens, halves to the even number.

    Raises:
        UsageError: ratio outside [0, 1].
    """
    _within("length_ratio: ratio", ratio)
    return lambda length, entropy_T, rng: length_cut(length, ratio)


def top_entropy(k: int, *, at: str = "before") -> Cut:
    """Cut at one of the k positions of highest entropy, uniformly; ties go to the earlier position, short responses have fewer.

    Args:
        at: `before` has the token at the position sampled again (the cut is its index), `after` keeps it (index + 1).
    Raises:
        UsageError: k < 1, or another `at`.
        DataError: (when cutting) no stored entropies.
    """
    entropy_cuts([], k, where=at)

    def cut(length: int, entropy_T: Array | None, rng: np.random.Generator) -> int:
        if entropy_T is None or not np.isfinite(entropy_T).all():
            raise DataError("rollout.cut.kind = top_entropy", got="stored responses without entropies", expected="the entropy of every token",
                            do="Store the seed bank with entropies, or cut by length_ratio.")  # fmt: skip
        choices = entropy_cuts(entropy_T.tolist(), k, where=at)
        return choices[int(rng.integers(len(choices)))] if choices else 0

    return cut


def random_ratio(low: float = 0.0, high: float = 1.0) -> Cut:
    """Keep a share of the tokens drawn uniformly from [low, high], rounded like `length_ratio`.

    Raises:
        UsageError: bounds outside [0, 1] or in the wrong order.
    """
    _within("random_ratio: low", low)
    _within("random_ratio: high", high)
    if low > high:
        raise UsageError("random_ratio: low", got=low, expected=f"at most high = {high}", do="Swap the bounds.")
    return lambda length, entropy_T, rng: length_cut(length, min(low + (high - low) * float(rng.random()), high))


def tokens_kept(cut: Cut, length: int, entropy_T: Array | None, rng: np.random.Generator, *, owner: str) -> int:
    """What `cut` says of this response, checked.

    Args:
        owner: names the response in error messages.
    Raises:
        EngineError: the cut raised, or returned anything but a whole number from 0 to `length`.
        DataError, UsageError: raised by a cut of this module.
    """
    try:
        kept = cut(length, entropy_T, rng)
    except (DataError, UsageError):
        raise
    except (Exception, SystemExit) as error:  # sys.exit(0) in it would end the run as if it were done
        raise EngineError(f"rollout.cut: {owner}", got=f"{type(error).__name__}: {error}", expected=f"a number of tokens from 0 to {length}",
                          do="Mend the cut's function.") from error  # fmt: skip
    if not isinstance(kept, Integral) or isinstance(kept, bool) or not 0 <= kept <= length:
        raise EngineError(f"rollout.cut: {owner}", got=repr(kept), expected=f"a whole number of tokens from 0 to {length}, the response's length",
                          do="Mend the cut's function.")  # fmt: skip
    return int(kept)


def _within(what: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise UsageError(what, got=share, expected="a share in [0, 1]", do="Cut inside the response.")
