"""A reward function of one's own, in TRL's signature, and a run that trains on it.

    python examples/own_reward.py

The function gets the prompts, the completions and every column of the data as lists of equal length, and returns one number for each
completion, or None to abstain. It runs in a worker process with a deadline: one that hangs, crashes or raises costs its own response and
nothing else, and is counted (`reward/timeout`, `reward/error`), never turned into a reward of 0.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def shows_steps(prompts: Sequence[str], completions: Sequence[str], *, per_step: float = 0.05, **columns: Any) -> list[float | None]:
    """`per_step` for every step written out as "a+43=2" (instead of "a+42"); None for a response without an answer mark."""
    return [None if "#" not in text else per_step * text.count("=") for text in completions]


def main(words: list[str] | None = None) -> Path:
    """Train the embedded model on its own verifier plus 0.05 for each step that is written out; returns the report's path."""
    from nearpolicy.build import config_for, train

    parser = argparse.ArgumentParser(description="Train on a reward function of one's own.")
    parser.add_argument("--out", default="runs/own-reward", help="run directory")
    parser.add_argument("parts", nargs="*", help="further recipe names, TOML files or key=value words")
    args = parser.parse_args(words)
    here = Path(__file__).resolve()
    rewards = f'task.rewards=[{{function="arithmetic"}}, {{function="{here}:shows_steps", options={{per_step=0.05}}}}]'
    return train(config_for(["tiny", rewards, "train.steps=64", *args.parts]), args.out)


if __name__ == "__main__":
    print(f"report: {main()}")
