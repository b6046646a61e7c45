"""The order in which prompts are used: a function of (seed, cursor), so that one integer resumes it exactly."""

from typing import Any

import numpy as np

from nearpolicy.errors import CheckpointError, DataError
from nearpolicy.randomness import generator
from nearpolicy.rollout import Array


class PromptOrder:
    """Row indices, epoch by epoch in a keyed permutation; endless rows simply in order.

    index(c) = permutation(seed, c div n)[c mod n] for n rows, and c for endless rows. The cursor is the whole state.

    Args:
        num_rows: rows of the task; None is endless.
        seed: run seed.
    Raises:
        DataError: no rows.
    """

    def __init__(self, num_rows: int | None, seed: int) -> None:
        if num_rows is not None and num_rows < 1:
            raise DataError("Prompt order", got=f"{num_rows} rows", expected="at least one", do="Give the task rows to train on.")
        self.num_rows, self.seed = num_rows, seed
        self.cursor = 0
        """Prompts handed out so far."""
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Whole passes over the rows so far; 0 for endless rows."""
        return 0 if self.num_rows is None else self.cursor // self.num_rows

    def index(self, cursor: int) -> int:
        """Row at this cursor >= 0; does not move."""
        if self.num_rows is None:
            return cursor
        epoch, place = divmod(cursor, self.num_rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, _permutation(self.num_rows, self.seed, epoch)
        return int(self._permutation[place])

    def take(self, n: int) -> list[int]:
        """The next n rows; crosses epochs where it must."""
        taken = [self.index(c) for c in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it is a cursor of."""
        return {"cursor": self.cursor, "num_rows": self.num_rows, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            CheckpointError: it is of another number of rows or another seed, so that the cursor would mean other prompts.
        """
        mine = {"num_rows": self.num_rows, "seed": self.seed}
        theirs = {key: state[key] for key in mine}
        if mine != theirs:
            raise CheckpointError("Prompt order", got=f"a state of {theirs}", expected=f"{mine}", do="Resume with the data and seed it began with.")
        self.cursor = int(state["cursor"])


def _permutation(n: int, seed: int, epoch: int) -> Array:
    """Sorting keyed uniforms: unlike `Generator.permutation`, independent of how the library shuffles."""
    return np.argsort(generator(seed, "prompt order", epoch).random(n), kind="stable")
