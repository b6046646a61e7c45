"""The exact oracle: every sequence of a toy policy, with its probability, so that expectations are sums and gradients have no noise.

A toy policy over V tokens (default 3) and at most L of them (default 3; V = 3, L = 4 gives 31 sequences) has one row of logits for each
prefix. Token 0 ends a sequence; one that reaches L tokens ends there. Probabilities of all sequences add up to one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """All sequences of a toy policy, padded to L."""

    token_NL: Tensor
    """int64; 0 after the end."""
    mask_NL: Tensor
    """True at tokens that exist, the end token included."""
    prefix_NL: Tensor
    """Row of logits that each token is drawn from; 0 after the end."""

    def __len__(self) -> int:
        return len(self.token_NL)


def enumerate_sequences(vocab: int = 3, max_length: int = 3) -> Sequences:
    """Every sequence that ends in token 0 or has `max_length` tokens, in order of length."""
    rows = {prefix: i for i, prefix in enumerate(p for n in range(max_length) for p in product(range(1, vocab), repeat=n))}
    ended = [(*body, 0) for n in range(max_length) for body in product(range(1, vocab), repeat=n)]
    full = list(product(range(1, vocab), repeat=max_length))
    sequences = ended + full
    token = torch.zeros(len(sequences), max_length, dtype=torch.long)
    mask = torch.zeros(len(sequences), max_length, dtype=torch.bool)
    prefix = torch.zeros(len(sequences), max_length, dtype=torch.long)
    for i, sequence in enumerate(sequences):
        for t, v in enumerate(sequence):
            token[i, t], mask[i, t], prefix[i, t] = v, True, rows[sequence[:t]]
    return Sequences(token, mask, prefix)


def random_logits(seed: int, *, vocab: int = 3, max_length: int = 3, scale: float = 1.0) -> Tensor:
    """Logits of a random toy policy, float64 [prefixes, V]; a function of the seed alone."""
    prefixes = sum((vocab - 1) ** n for n in range(max_length))
    return scale * torch.randn(prefixes, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def token_logp(logits: Tensor, sequences: Sequences) -> Tensor:
    """log pi of each token given its prefix, [N, L], nats, with gradient to the logits; 0 after the end."""
    logp = logits.log_softmax(1)[sequences.prefix_NL, sequences.token_NL]
    return torch.where(sequences.mask_NL, logp, 0.0)


def probability(logits: Tensor, sequences: Sequences) -> Tensor:
    """Probability of each sequence, [N]; they add up to one."""
    return token_logp(logits, sequences).sum(1).exp()


def gradient(value: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """d value(logits) / d logits by autograd, same shape."""
    leaf = logits.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(value(leaf), leaf)
    return grad
