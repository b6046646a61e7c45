"""The seams. Each protocol states its contract; `tests/contract` runs one suite against every implementation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from nearpolicy.metrics import Metrics
from nearpolicy.randomness import Stream
from nearpolicy.rollout import Array, Batch, Prefix, Prompt, Rollout, Score, Scored


class LogProbs(NamedTuple):
    """What a policy says of a batch."""

    logp_BT: Tensor
    """log pi(token[b, t] | tokens[b, <t]) at the row's temperature, float32 [B, T]; 0 outside the response."""
    entropy_BT: Tensor
    """Entropy of that distribution, float32 [B, T], detached; 0 outside the response."""


class Policy(Protocol):
    """A causal language model that can be trained.

    `score` carries gradient when autograd is on, returns float32, and agrees for a row alone, padded, packed or prompt-shared.
    """

    def score(self, batch: Batch) -> LogProbs:
        """Log-probs and entropies of every response token."""
        ...


class Teacher(Protocol):
    """A fixed model that scores responses for distillation."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """float32 [T] for each rollout: exactly one log-prob for each response token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One group to sample."""

    ticket: int
    """Ledger ticket; becomes `Rollout.group` and keys the randomness."""
    prompt: Prompt
    attempt: int = 0
    prefixes: Sequence[Prefix | None] | None = None
    """One for each of the n samples, or None: everything is sampled."""
    first_sample: int = 0
    """Index of the first sample, for groups that are topped up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. Log-probs are of the temperature-scaled distribution, before top-p and top-k."""

    max_tokens: int
    """Largest response length, a prefix included."""
    temperature: float = 1.0
    """0 is greedy (evaluation only): log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int | None = None
    eos_ids: frozenset[int] = frozenset()
    """Any of these ends a response (the token is part of it)."""
    stop_strings: tuple[str, ...] = ()
    """Any of these in the decoded response ends it, at the token that completes it."""
    entropy: bool = False
    """Also return the entropy at each token."""
    routes: bool = False
    """Also return the experts of each context token (`Rollout.routes`), the prefix included, whatever recorded them before."""
    stream: Stream = Stream.ROLLOUT
    seed: int = 0
    """Run seed of the randomness keys."""


class Sampler(Protocol):
    """Writes responses.

    Contract: n rollouts for each request, in request order, samples in order. Every sampled token carries `version` and its exact
    log-prob under the loaded weights; prefix tokens keep theirs. Draws depend on (seed, stream, ticket, sample, attempt, position)
    alone. `stop` is EOS, LENGTH or STOP_STRING as the engine saw it; a prefix that had stopped stays as it is.
    """

    version: int
    """Version of the loaded weights."""

    def sample(self, requests: Sequence[Request], n: int, params: SamplingParams) -> list[Rollout]:
        """n rollouts a request, flat, in request order."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights (Hugging Face names) from now on. They are read before it returns."""
        ...


class Verifier(Protocol):
    """Scores responses; total over `ScoreItem`s: never raises, never hangs, one Score each, in order."""

    def score(self, items: Sequence["ScoreItem"]) -> list[Score]:
        """One score an item, within the deadline for each."""
        ...

    def close(self) -> None:
        """End the workers; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """A response to score. Picklable: it travels to a worker process."""

    prompt: Any
    """The prompt as the data row gave it: a string or messages."""
    completion: str
    columns: Mapping[str, Any]

    @classmethod
    def of(cls, prompt: Prompt, rollout: Rollout) -> "ScoreItem":
        """What a reward function is told of a response to this prompt."""
        columns = {k: v for k, v in prompt.columns.items() if k != "prompt"}
        return cls(prompt=prompt.columns.get("prompt", prompt.text), completion=rollout.text, columns=columns)


Upcoming = Callable[[int], tuple[int, Prompt]]
"""k -> (ticket, prompt) of the k-th group after those that the rollout batch at hand needs."""


Tickets = Sequence[tuple[int, Prompt, int]]
"""(ticket, prompt, attempt) of the groups to write."""


class Order(NamedTuple):
    """What a sampler is asked for: `sampler.sample(*order)`."""

    requests: Sequence[Request]
    n: int
    """Responses to each request."""
    params: SamplingParams


class RolloutSource(Protocol):
    """Decides who writes which part of a response.

    `write` is `deliver` of what the source's sampler makes of `order`. A schedule whose samplers work elsewhere calls the two apart, for any
    partition of the tickets and in any order; what `order` decides for a ticket does not depend on the tickets beside it.
    """

    @property
    def tokens_decoded(self) -> int:
        """Response tokens decoded by this object since it was made, those stored for later rollout batches included."""
        ...

    def begin(self, version: int, upcoming: Upcoming) -> None:
        """A new rollout batch begins; the sampler holds the weights of this version. Called once before its `write`s, of which there may be any
        number."""
        ...

    def order(self, tickets: Tickets, n: int) -> Order:
        """What a sampler must write so that there are n rollouts for each ticket: one request a ticket."""
        ...

    def deliver(self, tickets: Tickets, n: int, flat: Sequence[Rollout]) -> list[list[Rollout]]:
        """n rollouts a ticket, grouped, from what a sampler made of `order` for these tickets; counted as decoded."""
        ...

    def write(self, tickets: Tickets, n: int) -> list[list[Rollout]]:
        """n rollouts for each ticket, grouped."""
        ...

    def metrics(self) -> Metrics:
        """What was measured since the last call, besides what every schedule measures."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next call depends on (JSON values and tensors). `files`, when there, names files of the run that belong to it:
        a checkpoint takes them along."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        ...


class Schedule(Protocol):
    """Decides when which data is trained on."""

    tokens_sampled: int
    """Response tokens decoded since the start of the run."""
    last_scored: Sequence[Scored]
    """The rollout batch that the last `next` was taken from, where it is still known."""

    def next(self, version: int) -> Batch:
        """The batch of the next optimizer update, given how many updates the policy contains."""
        ...

    def metrics(self) -> Metrics:
        """What was measured since the last call: rewards, responses, ages, times."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batch depends on, a half-used rollout batch included."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        ...

    def close(self) -> None:
        """End what it has started; idempotent."""
        ...
