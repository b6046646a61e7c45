"""What every `Workers` must do. Subclasses say how to make two workers that sample from tables of logits, how to hold them, and how to kill one."""

import time

import numpy as np
import pytest
import torch

from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Prompt, StopReason
from nearpolicy.schedule.workers import Died, Finished, Job

V = 6
DEADLINE_S = 60.0


def table(version):
    """The published weights of a version."""
    return {"logits": torch.randn(V, V, generator=torch.Generator().manual_seed(version), dtype=torch.float64)}


def job(ticket, *, n=2, tokens=8, eos=(0,), attempt=0):
    prompt = Prompt(id=str(ticket), token_P=np.array([1 + ticket % (V - 1)]), text="")
    return Job(
        request=Request(ticket=ticket, prompt=prompt, attempt=attempt), n=n, params=SamplingParams(max_tokens=tokens, eos_ids=frozenset(eos), seed=3)
    )


def collect(workers, tickets):
    """Events until all these tickets were heard of."""
    heard, events, end = set(), [], time.monotonic() + DEADLINE_S
    while not heard >= set(tickets):
        assert time.monotonic() < end, f"nothing of {set(tickets) - heard}"
        for event in workers.poll(1.0):
            events.append(event)
            heard |= {event.ticket} if isinstance(event, Finished) else set(event.tickets)
    return events


def logp(rollout):
    """Log-prob of each response token under the table of its own version."""
    ids = np.concatenate([rollout.prompt_P[-1:], rollout.response_T])
    rows = {int(v): torch.log_softmax(table(int(v))["logits"], 1).numpy() for v in set(rollout.version_T.tolist())}
    return np.array([rows[int(v)][a, b] for v, a, b in zip(rollout.version_T, ids[:-1], ids[1:], strict=True)])


class WorkersSuite:
    """The fixtures `keep` and `finish` give two workers of capacity 4; the tests may share them."""

    def kill(self, workers, worker):
        raise NotImplementedError

    def publish(self, workers):
        """The next version."""
        self.last = getattr(type(self), "last", -1) + 1
        type(self).last = self.last
        workers.publish(table(self.last), self.last)
        return self.last

    def test_each_job_is_delivered_once_and_whole(self, keep):
        version = self.publish(keep)
        assert keep.count == 2
        assert [keep.free(w) for w in range(2)] == [4, 4]
        keep.submit(0, [job(10), job(11, n=3)])
        keep.submit(1, [job(12)])
        assert keep.free(0) <= 2
        events = collect(keep, [10, 11, 12])
        assert sorted((e.worker, e.ticket, len(e.rollouts)) for e in events) == [(0, 10, 2), (0, 11, 3), (1, 12, 2)]
        for event in events:
            assert [r.sample for r in event.rollouts] == list(range(len(event.rollouts)))
            assert event.seconds > 0
            for r in event.rollouts:
                assert r.group == event.ticket
                assert set(r.version_T.tolist()) == {version}
                assert r.stop in (StopReason.EOS, StopReason.LENGTH)
                np.testing.assert_allclose(r.logp_behavior_T, logp(r), rtol=0, atol=1e-6)
        assert [keep.free(w) for w in range(2)] == [4, 4]
        assert keep.poll(0.0) == []

    def test_draws_do_not_depend_on_the_worker_or_on_company(self, keep):
        self.publish(keep)
        keep.submit(0, [job(20), job(21), job(22)])
        first = {e.ticket: [r.response_T.tolist() for r in e.rollouts] for e in collect(keep, [20, 21, 22])}
        keep.submit(1, [job(22)])
        keep.submit(0, [job(20)])
        second = {e.ticket: [r.response_T.tolist() for r in e.rollouts] for e in collect(keep, [20, 22])}
        assert second == {t: first[t] for t in (20, 22)}

    def test_a_job_after_a_publication_is_written_under_it(self, finish):
        for ticket in (30, 31, 32):
            version = self.publish(finish)
            finish.submit(0, [job(ticket)])
            (event,) = collect(finish, [ticket])
            assert {v for r in event.rollouts for v in r.version_T.tolist()} == {version}

    def test_kept_responses_go_on_under_the_new_weights(self, keep):
        old = self.publish(keep)
        self.hold()
        keep.submit(0, [job(40, tokens=60, eos=())])
        self.begin(keep)
        new = self.publish(keep)
        self.arrived(keep)
        self.release()
        (event,) = collect(keep, [40])
        seen = {v for r in event.rollouts for v in r.version_T.tolist()}
        assert seen == {old, new}
        for r in event.rollouts:
            assert len(r.response_T) == 60
            assert (np.diff(r.version_T) >= 0).all()
            assert r.prefix_length == 0
            np.testing.assert_allclose(r.logp_behavior_T, logp(r), rtol=0, atol=1e-6)

    def test_finished_responses_stay_under_the_old_weights(self, finish):
        old = self.publish(finish)
        self.hold()
        finish.submit(1, [job(50, tokens=40, eos=())])
        self.begin(finish)
        new = self.publish(finish)
        self.arrived(finish)
        self.release()
        (event,) = collect(finish, [50])
        assert {v for r in event.rollouts for v in r.version_T.tolist()} == {old}
        finish.submit(1, [job(51)])
        (event,) = collect(finish, [51])
        assert {v for r in event.rollouts for v in r.version_T.tolist()} == {new}

    def test_a_killed_worker_loses_its_jobs_once_and_another_stands_in_its_place(self, keep):
        version = self.publish(keep)
        self.hold()
        keep.submit(0, [job(60, tokens=60, eos=()), job(61, tokens=60, eos=())])
        self.begin(keep)
        self.kill(keep, 0)
        self.release()
        events = collect(keep, [60, 61])
        died = [e for e in events if isinstance(e, Died)]
        assert [(e.worker, sorted(e.tickets)) for e in died] == [(0, [60, 61])]
        assert died[0].reason
        assert "\n" not in died[0].reason
        keep.submit(0, [job(60, attempt=1), job(61, attempt=1)])
        events = collect(keep, [60, 61])
        assert sorted(e.ticket for e in events) == [60, 61]
        assert {v for e in events for r in e.rollouts for v in r.version_T.tolist()} == {version}
        assert keep.poll(0.2) == []

    def test_more_than_is_free_is_refused(self, keep):
        self.publish(keep)
        keep.submit(0, [job(70 + i) for i in range(4)])
        with pytest.raises(ValueError, match="worker 0"):
            keep.submit(0, [job(79)])
        collect(keep, range(70, 74))

    def hold(self):
        """From now on responses stop after a few tokens, until `release`."""

    def begin(self, workers):
        """Return when what was submitted is being written, and not yet complete."""
        raise NotImplementedError

    def arrived(self, workers):
        """Return when the workers know of the newest publication."""

    def release(self):
        """Let responses go on."""
