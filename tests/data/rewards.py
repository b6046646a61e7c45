"""Reward functions of the tests, in TRL's signature."""

import time


def ones(prompts, completions, **columns):
    """Share of '1' among the first 8 characters: a dense signal that a random model can climb at once."""
    return [text[:8].count("1") / 8 for text in completions]


def all_right(prompts, completions, **columns):
    return [1.0] * len(completions)


def raises(prompts, completions, **columns):
    raise RuntimeError("the verifier is broken")


def is_nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)


def wrong_length(prompts, completions, **columns):
    return [1.0] * (len(completions) + 1)


def hangs_sometimes(prompts, completions, **columns):
    if len(completions[0]) % 2:
        time.sleep(3600)
    return [float(len(completions[0])) / 8]


def digits(prompts, completions, **columns):
    """Share of digits: a random model's responses all differ in it."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
