"""The contract of `protocols.Sampler` as tests. A subclass gives `make` and `reference`; the vocabulary is 12 letters (`FakeTokenizer`)."""

import numpy as np
import pytest
import torch
from scipy import stats

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.randomness import Stream
from nearpolicy.rollout import Prefix, Prompt, Source, StopReason
from nearpolicy.testing.fakes import FakeTokenizer

VOCAB = 12
TOKENIZER = FakeTokenizer()


def request(ticket, ids=(3, 4, 5), **options):
    """A request whose prompt has these ids."""
    return Request(ticket=ticket, prompt=Prompt(id=f"p{ticket}", token_P=np.array(ids), text=TOKENIZER.decode(list(ids))), **options)


def params(max_tokens=6, **options):
    """Sampling parameters with a short default."""
    return SamplingParams(max_tokens=max_tokens, **options)


def mixed_requests():
    """Prompts of different lengths and contents."""
    rng = np.random.default_rng(5)
    return [request(ticket, rng.integers(0, VOCAB, length)) for ticket, length in enumerate((1, 9, 3, 3, 6))]


def key(rollout):
    """What names a rollout."""
    return rollout.group, rollout.sample


class SamplerSuite:
    """Subclass with `make(max_rows=...)` -> sampler, `reference(sampler, ids)` -> logits [T, V] of the next token after each id,
    `constant(sampler, logits_V)` -> weights under which every next token has these logits, `other(sampler)` -> other weights."""

    tolerance = 1e-4
    own_noise = True
    """False for engines with noise of their own: a seed for each request, but none for each position of it."""
    entropies = True
    """False for engines that give none: asking for them is refused."""
    filtered_logp = False
    """True for engines whose log-probs are those after top-k and top-p (which only evaluation uses)."""

    def make(self, **options):
        raise NotImplementedError

    def reference(self, sampler, ids):
        raise NotImplementedError

    def constant(self, sampler, logits):
        raise NotImplementedError

    def other(self, sampler):
        raise NotImplementedError

    def logp(self, sampler, rollout, temperature=1.0):
        """Teacher-forced log-softmax rows that predict the response."""
        ids = np.concatenate([rollout.prompt_P, rollout.response_T])
        rows = self.reference(sampler, ids)[len(rollout.prompt_P) - 1 : -1]
        return (rows.double() / temperature).log_softmax(-1)

    def test_order_and_count(self):
        out = self.make().sample(mixed_requests(), 3, params())
        assert [key(r) for r in out] == [(ticket, sample) for ticket in range(5) for sample in range(3)]
        assert [r.prompt_id for r in out[::3]] == [f"p{i}" for i in range(5)]
        for r, q in zip(out[::3], mixed_requests(), strict=True):
            assert r.prompt_P.tolist() == q.prompt.token_P.tolist()
            assert r.source is Source.FRESH
            assert r.text == TOKENIZER.decode(r.response_T.tolist())

    def test_no_requests(self):
        assert self.make().sample([], 3, params()) == []

    def test_first_sample_continues_a_group(self):
        sampler = self.make()
        whole = sampler.sample([request(7)], 4, params())
        top_up = sampler.sample([request(7, first_sample=2)], 2, params())
        assert [r.response_T.tolist() for r in top_up] == [r.response_T.tolist() for r in whole[2:]]
        assert [r.sample for r in top_up] == [2, 3]

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
    def test_log_probs_and_entropy_equal_teacher_forcing(self, temperature):
        sampler = self.make()
        for r in sampler.sample(mixed_requests(), 2, params(temperature=temperature, entropy=self.entropies)):
            rows = self.logp(sampler, r, temperature)
            want = rows.gather(1, torch.from_numpy(r.response_T)[:, None])[:, 0]
            np.testing.assert_allclose(r.logp_behavior_T, want, atol=self.tolerance, rtol=0)
            if self.entropies:
                np.testing.assert_allclose(r.entropy_T, -(rows.exp() * rows).sum(-1), atol=self.tolerance, rtol=0)
            assert r.logp_behavior_T.dtype == np.float32
            assert r.temperature == temperature

    def test_entropy_only_when_asked(self):
        sampler = self.make()
        assert sampler.sample([request(0)], 1, params())[0].entropy_T is None
        if not self.entropies:
            with pytest.raises(UsageError, match="entropy"):
                sampler.sample([request(0)], 1, params(entropy=True))

    def test_draws_do_not_depend_on_the_batch(self):
        eos = params(max_tokens=7, eos_ids=frozenset({0, 1}))
        whole = {key(r): r for r in self.make(max_rows=64).sample(mixed_requests(), 2, eos)}
        variants = [
            self.make(max_rows=3).sample(mixed_requests(), 2, eos),
            self.make(max_rows=64).sample(mixed_requests()[::-1], 2, eos),
            [r for q in mixed_requests() for r in self.make(max_rows=64).sample([q], 2, eos)],
        ]
        for variant in variants:
            assert {key(r) for r in variant} == set(whole)
            for r in variant:
                assert r.response_T.tolist() == whole[key(r)].response_T.tolist()
                assert r.stop is whole[key(r)].stop
                np.testing.assert_allclose(r.logp_behavior_T, whole[key(r)].logp_behavior_T, atol=self.tolerance, rtol=0)

    def test_noise_differs_between_samples_streams_attempts_tickets_and_seeds(self):
        sampler = self.make()

        def draw(q=None, **options):
            return [tuple(r.response_T) for r in sampler.sample([q or request(0)], 2, params(max_tokens=12, **options))]

        first, second = draw()
        assert first != second
        assert draw() == [first, second]
        others = [draw(stream=Stream.BANK), draw(stream=Stream.EVAL), draw(seed=1), draw(request(0, attempt=1)), draw(request(1))]
        drawn = [first, second, *(t for pair in others for t in pair)]
        assert len(set(drawn)) == len(drawn)

    def test_eos_set_ends_responses_and_is_part_of_them(self):
        sampler = self.make()
        eos = frozenset({2, 5, 9})
        out = sampler.sample(mixed_requests(), 8, params(max_tokens=12, eos_ids=eos))
        ended = [r for r in out if r.stop is StopReason.EOS]
        assert {int(r.response_T[-1]) for r in ended} == eos
        for r in out:
            assert not set(r.response_T[:-1].tolist()) & eos
            assert (r.stop is StopReason.EOS) == (int(r.response_T[-1]) in eos)
            assert r.stop is StopReason.EOS or (r.stop is StopReason.LENGTH and len(r.response_T) == 12)
        free = {key(r): r for r in sampler.sample(mixed_requests(), 8, params(max_tokens=12))}
        for r in ended:  # the same draws as without EOS, cut there
            assert r.response_T.tolist() == free[key(r)].response_T[: len(r.response_T)].tolist()

    def test_eos_beats_length_at_the_last_token(self):
        sampler = self.make()
        free = sampler.sample([request(0)], 1, params(max_tokens=5))[0]
        assert free.stop is StopReason.LENGTH
        assert len(free.response_T) == 5
        last = int(free.response_T[-1])
        out = sampler.sample([request(0)], 1, params(max_tokens=5, eos_ids=frozenset({last})))[0]
        first = free.response_T.tolist().index(last)
        assert (out.stop, out.response_T.tolist()) == (StopReason.EOS, free.response_T[: first + 1].tolist())

    def test_pad_and_eos_with_one_id(self):
        """Ids [5, 6, 2, 2, 2] with pad = eos = 2: the prompt's 2s are tokens, the first sampled 2 ends the response and none follow it."""
        sampler = self.make()
        sampler.load(self.constant(sampler, [-9.0 if v not in (2, 6) else 0.0 for v in range(VOCAB)]), 1)
        out = sampler.sample([request(0, (5, 6, 2, 2, 2))], 16, params(max_tokens=4, eos_ids=frozenset({2})))
        assert {len(r.response_T) for r in out} == {1, 2, 3, 4}
        for r in out:
            assert r.prompt_P.tolist() == [5, 6, 2, 2, 2]
            assert (r.response_T == 2).sum() == (r.stop is StopReason.EOS)
            np.testing.assert_allclose(r.logp_behavior_T, np.log(1 / (2 + 10 * np.exp(-9.0))), atol=max(self.tolerance, 1e-3))

    def test_never_empty_and_one_token_is_possible(self):
        out = self.make().sample(mixed_requests(), 4, params(max_tokens=1, eos_ids=frozenset(range(6))))
        for r in out:
            assert len(r.response_T) == 1
            assert r.stop is (StopReason.EOS if r.response_T[0] < 6 else StopReason.LENGTH)

    def test_stop_string_ends_at_the_token_that_completes_it(self):
        sampler = self.make()
        free = sampler.sample(mixed_requests(), 6, params(max_tokens=10))
        stop = free[0].text[3:5]
        out = sampler.sample(mixed_requests(), 6, params(max_tokens=10, stop_strings=("zz", stop)))
        assert any(r.stop is StopReason.STOP_STRING for r in out)
        for r, f in zip(out, free, strict=True):
            at = f.text.find(stop)
            assert r.text == (f.text if at < 0 else f.text[: at + 2])
            assert r.stop is (StopReason.LENGTH if at < 0 else StopReason.STOP_STRING)

    def test_eos_beats_stop_string_beats_length(self):
        sampler = self.make()
        text = sampler.sample([request(0)], 1, params(max_tokens=3))[0].text
        last = TOKENIZER.encode(text[-1])[0]
        limits = {"max_tokens": 3, "stop_strings": (text,)}
        assert sampler.sample([request(0)], 1, params(**limits))[0].stop is StopReason.STOP_STRING
        if last not in TOKENIZER.encode(text[:-1]):
            assert sampler.sample([request(0)], 1, params(**limits, eos_ids=frozenset({last})))[0].stop is StopReason.EOS

    def prefix(self, ids, **options):
        """A stored prefix of an older version."""
        T = len(ids)
        return Prefix(
            token_T=np.array(ids), logp_behavior_T=np.linspace(-2, -1, T).astype(np.float32), version_T=np.full(T, 3),
            entropy_T=np.linspace(0.1, 0.2, T).astype(np.float32), **options,
        )  # fmt: skip

    def test_prefix_of_three_and_five_sampled(self):
        sampler = self.make()
        sampler.load(self.other(sampler), 8)
        stored = self.prefix([7, 8, 1])
        r, alone = sampler.sample([request(0, prefixes=[stored, None])], 2, params(max_tokens=8, entropy=self.entropies))
        assert r.response_T[:3].tolist() == [7, 8, 1]
        assert (r.prefix_length, r.num_sampled, r.source) == (3, 5, Source.RELAY)
        assert r.version_T.tolist() == [3, 3, 3, 8, 8, 8, 8, 8]
        assert r.logp_behavior_T[:3].tolist() == stored.logp_behavior_T.tolist()
        if self.entropies:
            assert r.entropy_T[:3].tolist() == stored.entropy_T.tolist()
        rows = self.logp(sampler, r)[3:]
        np.testing.assert_allclose(r.logp_behavior_T[3:], rows.gather(1, torch.from_numpy(r.response_T[3:, None]))[:, 0], atol=self.tolerance, rtol=0)
        assert (alone.prefix_length, alone.source, len(alone.response_T)) == (0, Source.FRESH, 8)
        assert alone.version_T.tolist() == [8] * 8

    def test_own_prefix_and_position_keep_the_draws(self):
        """The noise belongs to the position: going on from its own first tokens gives the same response."""
        if not self.own_noise:
            pytest.skip("an engine with noise of its own")
        sampler = self.make()
        whole = sampler.sample(mixed_requests(), 2, params(max_tokens=9))
        stored = [Prefix(token_T=r.response_T[:k], logp_behavior_T=r.logp_behavior_T[:k], version_T=r.version_T[:k])
                  for k, r in zip((1, 5, 2, 8, 0, 3, 4, 4, 7, 6), whole, strict=True)]  # fmt: skip
        again = sampler.sample(
            [request(q.ticket, q.prompt.token_P, prefixes=stored[2 * i : 2 * i + 2]) for i, q in enumerate(mixed_requests())], 2, params(max_tokens=9)
        )
        assert [r.response_T.tolist() for r in again] == [r.response_T.tolist() for r in whole]
        for a, b in zip(again, whole, strict=True):
            np.testing.assert_allclose(a.logp_behavior_T, b.logp_behavior_T, atol=self.tolerance, rtol=0)

    def test_finished_prefixes_stay_finished(self):
        done = self.prefix([7, 8, 2], stop=StopReason.EOS)
        empty = self.prefix([], stop=StopReason.ABORTED)
        full = self.prefix([7, 8, 1, 1])
        out = self.make().sample([request(0, prefixes=[done, empty, full, None])], 4, params(max_tokens=4, eos_ids=frozenset({2})))
        assert [r.stop for r in out[:3]] == [StopReason.EOS, StopReason.ABORTED, StopReason.LENGTH]
        assert [r.num_sampled for r in out[:3]] == [0, 0, 0]
        assert out[0].response_T.tolist() == [7, 8, 2]
        assert out[0].logp_behavior_T.tolist() == done.logp_behavior_T.tolist()
        assert len(out[3].response_T) >= 1

    def test_stop_string_across_the_prefix(self):
        sampler = self.make()
        free = sampler.sample([request(0)], 1, params(max_tokens=6))[0]
        k = 3
        stored = Prefix(token_T=free.response_T[:k], logp_behavior_T=free.logp_behavior_T[:k], version_T=free.version_T[:k])
        q = request(0, prefixes=[stored])
        text = free.text if self.own_noise else sampler.sample([q], 1, params(max_tokens=6))[0].text
        r = sampler.sample([q], 1, params(max_tokens=6, stop_strings=(text[: k + 1],)))[0]
        assert (r.stop, r.text) == (StopReason.STOP_STRING, text[: k + 1])

    def test_temperature_with_three_logits(self):
        """Faults row 10: logits (2, 1, 0) at T = 0.6 give exact probabilities; log-probs are of that distribution."""
        sampler = self.make()
        sampler.load(self.constant(sampler, [2.0, 1.0, 0.0] + [-80.0] * (VOCAB - 3)), 1)
        want = np.exp(np.array([2.0, 1.0, 0.0]) / 0.6)
        want /= want.sum()
        out = sampler.sample([request(i) for i in range(20)], 50, params(max_tokens=1, temperature=0.6))
        counts = np.bincount([r.response_T[0] for r in out], minlength=VOCAB)
        assert counts[3:].sum() == 0
        assert stats.chisquare(counts[:3], want * counts.sum()).pvalue > 1e-3
        for r in out[:50]:
            np.testing.assert_allclose(r.logp_behavior_T[0], np.log(want[r.response_T[0]]), atol=self.tolerance * 5, rtol=0)

    def test_draws_follow_a_known_distribution(self):
        sampler = self.make()
        logits = np.linspace(-2.0, 2.0, VOCAB)
        sampler.load(self.constant(sampler, logits.tolist()), 1)
        want = np.exp(logits) / np.exp(logits).sum()
        tokens = np.concatenate([r.response_T for r in sampler.sample([request(i) for i in range(20)], 10, params(max_tokens=10))])
        assert stats.chisquare(np.bincount(tokens, minlength=VOCAB), want * len(tokens)).pvalue > 1e-3

    def test_greedy_takes_the_largest(self):
        sampler = self.make()
        out = sampler.sample(mixed_requests(), 2, params(temperature=0.0))
        for r in out:
            rows = self.logp(sampler, r)
            best = rows.gather(1, torch.from_numpy(r.response_T)[:, None])[:, 0]
            assert (rows.max(-1).values - best).max() <= self.tolerance
            np.testing.assert_allclose(r.logp_behavior_T, best, atol=self.tolerance, rtol=0)
        assert out[0].response_T.tolist() == out[1].response_T.tolist()

    def test_top_k_and_top_p_filter_draws_but_not_log_probs(self):
        sampler = self.make()
        logits = np.log(np.array([0.4, 0.3, 0.2, 0.05, 0.05] + [1e-9] * (VOCAB - 5)))
        sampler.load(self.constant(sampler, logits.tolist()), 1)
        for options, kept in (({"top_k": 2}, {0, 1}), ({"top_p": 0.69}, {0, 1}), ({"top_p": 0.71}, {0, 1, 2}), ({"top_p": 0.9, "top_k": 1}, {0})):
            out = sampler.sample([request(i) for i in range(10)], 10, params(max_tokens=2, **options))
            assert {int(t) for r in out for t in r.response_T} == kept
            mass = np.exp(logits[sorted(kept)]).sum() if self.filtered_logp else 1.0
            for r in out[:20]:
                np.testing.assert_allclose(r.logp_behavior_T, logits[r.response_T] - np.log(mass), atol=max(self.tolerance, 1e-4) * 5, rtol=0)

    def test_load_changes_version_and_distribution(self):
        sampler = self.make()
        old = sampler.sample(mixed_requests(), 2, params())
        sampler.load(self.other(sampler), 41)
        assert sampler.version == 41
        new = sampler.sample(mixed_requests(), 2, params())
        assert {int(v) for r in new for v in r.version_T} == {41}
        assert {int(v) for r in old for v in r.version_T} == {0}
        assert [r.response_T.tolist() for r in new] != [r.response_T.tolist() for r in old]
        for r in new:
            want = self.logp(sampler, r).gather(1, torch.from_numpy(r.response_T)[:, None])[:, 0]
            np.testing.assert_allclose(r.logp_behavior_T, want, atol=self.tolerance, rtol=0)

    def test_wrong_weights_are_refused_and_nothing_changes(self):
        sampler = self.make()
        right = self.other(sampler)
        name, value = next((n, v) for n, v in right.items() if v.dim() == 2)
        before = sampler.sample([request(0)], 2, params())
        for wrong in (
            {("not_" + n if n == name else n): v for n, v in right.items()},
            {**right, "extra.weight": value},
            {**right, name: value[:-1]},
            {},
        ):
            with pytest.raises(EngineError, match="expected"):
                sampler.load(wrong, 99)
        after = sampler.sample([request(0)], 2, params())
        assert sampler.version == 0
        assert [r.response_T.tolist() for r in after] == [r.response_T.tolist() for r in before]

    def test_non_finite_logits_name_prompt_and_token(self):
        sampler = self.make()
        good = {name: value.clone() for name, value in self.other(sampler).items()}
        sampler.load({name: torch.full_like(value, float("nan")) for name, value in good.items()}, 1)
        with pytest.raises(EngineError, match=r"prompt 'p4'.*response token 0"):
            sampler.sample([request(4)], 2, params())
        sampler.load(good, 2)  # nothing of it stays behind
        for r in sampler.sample(mixed_requests(), 2, params()):
            assert np.isfinite(r.logp_behavior_T).all()
