"""Every rollout source against the contract of `protocols.RolloutSource`."""

import json

import numpy as np
import pytest
import torch

from nearpolicy.protocols import SamplingParams
from nearpolicy.records import join_arrays, pack, split_arrays
from nearpolicy.rollout import Prompt, Source
from nearpolicy.sources.cuts import length_ratio
from nearpolicy.sources.demonstrations import DemonstrationSource, Encoder
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.sources.relay import RelayOptions, RelaySource
from nearpolicy.testing.fakes import FakeSampler, FakeTokenizer

V, LIMIT, N = 9, 8, 4
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(0))


def fresh(folder, sampler, params):
    return FreshSource(sampler, params)


def relay(folder, sampler, params, **changes):
    options = {"refresh": 3, "relayed": 2, "shared": False, "groups": 4, "chunk": 3, "entropy": False} | changes
    return RelaySource(sampler, params, length_ratio(0.5), options=RelayOptions(**options), folder=folder, run="me")


def shared(folder, sampler, params):
    return relay(folder, sampler, params, shared=True)


def demonstrations(inner):
    def make(folder, sampler, params):
        encoder = Encoder(encode=FakeTokenizer().encode, eos_id=0, eos_ids=frozenset({0}), vocabulary=V, max_tokens=LIMIT)
        return DemonstrationSource(
            inner(folder, sampler, params), solutions=lambda p: ["bcd"], encoder=encoder, decode=lambda ids: "bcd", per_group=1, params=params
        )

    return make


MAKE = {"fresh": fresh, "relay": relay, "shared": shared, "shown": demonstrations(fresh), "shown beside relayed": demonstrations(relay)}


@pytest.fixture(params=MAKE)
def source(request, tmp_path):
    return made(request.param, tmp_path)


def made(kind, folder):
    params = SamplingParams(max_tokens=LIMIT, eos_ids=frozenset({0}), seed=2)
    source = MAKE[kind](folder, FakeSampler(TABLE), params)
    source.kind = kind
    return source


def prompt(ticket):
    return Prompt(id=f"p{ticket}", token_P=np.array([1 + ticket % 8]), text="")


def batch(source, number, size=2):
    """Rollout batch `number` (from 0) of two groups."""
    first = number * size
    source.begin(number, lambda k: (first + size + k, prompt(first + size + k)))
    return source.write([(t, prompt(t), 0) for t in range(first, first + size)], N)


def test_n_rollouts_a_ticket_in_order(source):
    for number in range(4):
        groups = batch(source, number)
        names = [[(r.group, r.sample, r.prompt_id) for r in g] for g in groups]
        assert names == [[(t, i, f"p{t}") for i in range(N)] for t in (2 * number, 2 * number + 1)]
        for r in (r for g in groups for r in g):
            assert 1 <= len(r.response_T) <= LIMIT
            assert (r.logp_behavior_T is None) == (r.source is Source.DEMONSTRATION)


def test_a_batch_may_be_written_in_parts_or_not_at_all(source, tmp_path):
    other = made(source.kind, tmp_path / "other")
    whole = [batch(source, number) for number in range(3)]
    for number in range(3):
        other.begin(number, lambda k, number=number: (2 * number + 2 + k, prompt(2 * number + 2 + k)))
        parts = [other.write([(t, prompt(t), 0)], N)[0] for t in (2 * number, 2 * number + 1)]
        assert [[r.response_T.tolist() for r in g] for g in parts] == [[r.response_T.tolist() for r in g] for g in whole[number]]
    other.begin(3, lambda k: (8 + k, prompt(8 + k)))


def test_written_is_delivered_of_what_the_sampler_made_of_the_order(source, tmp_path):
    """In parts, later ones first, and with samples taken by another sampler."""
    other = made(source.kind, tmp_path / "other")
    whole = [batch(source, number) for number in range(3)]
    elsewhere = FakeSampler(TABLE)
    for number in range(3):
        other.begin(number, lambda k, number=number: (2 * number + 2 + k, prompt(2 * number + 2 + k)))
        tickets = [(t, prompt(t), 0) for t in (2 * number, 2 * number + 1)]
        orders = [other.order([t], N) for t in tickets]
        written = [elsewhere.sample(*order) for order in reversed(orders)]
        parts = [other.deliver([t], N, flat)[0] for t, flat in zip(reversed(tickets), written, strict=True)]
        for group, want in zip(reversed(parts), whole[number], strict=True):
            assert [(r.group, r.sample, r.source, r.prefix_length, r.response_T.tolist()) for r in group] == [
                (r.group, r.sample, r.source, r.prefix_length, r.response_T.tolist()) for r in want
            ]
    assert other.tokens_decoded == source.tokens_decoded
    assert {k: v.value for k, v in other.metrics().items()} == pytest.approx({k: v.value for k, v in source.metrics().items()}, nan_ok=True)


def test_an_order_names_one_request_a_ticket(source):
    source.begin(0, lambda k: (2 + k, prompt(2 + k)))
    requests, n, params = source.order([(1, prompt(1), 3), (0, prompt(0), 0)], N)
    assert [(r.ticket, r.attempt) for r in requests] == [(1, 3), (0, 0)]
    assert n in (N, N - 1)
    assert params.seed == 2


def test_decoded_tokens_never_fall_and_cover_what_was_sampled(source):
    before = source.tokens_decoded
    assert before == 0
    for number in range(4):
        groups = batch(source, number)
        sampled = sum(r.num_sampled for g in groups for r in g if r.source is not Source.DEMONSTRATION)
        assert source.tokens_decoded >= before + sampled
        before = source.tokens_decoded


def test_metrics_are_taken_once(source):
    batch(source, 0)
    first, second = source.metrics(), source.metrics()
    assert set(second) <= set(first)
    for name, value in second.items():
        assert not value.value > 0, name


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_gone_on_with_after_any_batch(source, tmp_path, cut):
    for number in range(cut):
        batch(source, number)
    tree, arrays = split_arrays(pack(source.state_dict()), "s")
    again = made(source.kind, tmp_path)
    again.load_state_dict(join_arrays(json.loads(json.dumps(tree)), arrays))
    for number in range(cut, cut + 3):
        got = batch(again, number)
        want = batch(made_at(source.kind, tmp_path / f"ref{number}", number), number)
        for g, w in zip(got, want, strict=True):
            for a, b in zip(g, w, strict=True):
                assert a.response_T.tolist() == b.response_T.tolist()
                assert a.version_T.tolist() == b.version_T.tolist()
                assert (a.prefix_length, a.source, a.stop) == (b.prefix_length, b.source, b.stop)


def made_at(kind, folder, number):
    """A source that has lived through the batches before `number` in one piece."""
    source = made(kind, folder)
    for earlier in range(number):
        batch(source, earlier)
    return source
