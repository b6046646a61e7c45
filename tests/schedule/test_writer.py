"""The inside of a rollout worker, on threads instead of Ray: publications while it samples, calls in any order, errors as answers."""

import pickle
import threading

import numpy as np
import pytest
import torch

from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Prompt
from nearpolicy.sampler.publish import pack
from nearpolicy.schedule.workers import Job
from nearpolicy.schedule.writer import Failure, Held, Started, Writer
from nearpolicy.testing.fakes import FakeSampler

V, DEADLINE_S = 5, 20.0


def parcel(version):
    return pack({"logits": torch.randn(V, V, generator=torch.Generator().manual_seed(version))}, version)


def job(ticket, tokens=6):
    prompt = Prompt(id=str(ticket), token_P=np.array([1]), text="")
    return Job(request=Request(ticket=ticket, prompt=prompt), n=2, params=SamplingParams(max_tokens=tokens, seed=1))


class Gated(FakeSampler):
    """Says when it decodes, and decodes token `at` only when it is let."""

    def __init__(self, at=3):
        super().__init__(torch.zeros(V, V))
        self.at, self.steps, self.reached, self.go = at, 0, threading.Event(), threading.Event()

    def sample(self, requests, n, params, *, interrupt=None, refresh=None):
        def stop():
            self.steps += 1
            if self.steps == self.at:
                self.reached.set()
                assert self.go.wait(DEADLINE_S)
            return interrupt is not None and interrupt()

        return super().sample(requests, n, params, interrupt=stop, refresh=refresh)


def versions(answer):
    assert isinstance(answer, bytes), answer
    return [sorted({int(v) for r in rollouts for v in r.version_T}) for _, rollouts, _ in pickle.loads(answer)]


def writer(sampler=None, *, keep=True, wait_s=DEADLINE_S):
    made = Writer(lambda: sampler or FakeSampler(torch.zeros(V, V)), keep=keep, wait_s=wait_s)
    assert isinstance(made.start(), Started)
    return made


def test_groups_come_back_under_the_weights_that_were_published():
    w = writer()
    assert w.load(parcel(0), True) == Held(0)
    answer = w.write([job(1), job(2)], 0)
    assert versions(answer) == [[0], [0]]
    assert [ticket for ticket, _, _ in pickle.loads(answer)] == [1, 2]
    assert all(seconds > 0 for _, _, seconds in pickle.loads(answer))


def test_a_publication_that_is_late_is_waited_for():
    w, out = writer(), []
    thread = threading.Thread(target=lambda: out.append(w.write([job(1)], 4)))
    thread.start()
    w.load(parcel(3))
    assert out == []
    w.load(parcel(4))
    thread.join(DEADLINE_S)
    assert versions(out[0]) == [[4]]


def test_an_older_publication_that_comes_later_is_passed_over():
    w = writer()
    assert w.load(parcel(5), True) == Held(5)
    assert w.load(parcel(4), True) == Held(5)
    assert versions(w.write([job(1)], 5)) == [[5]]


@pytest.mark.parametrize(("keep", "seen"), [(True, [0, 1]), (False, [0])])
def test_a_publication_while_sampling(keep, seen):
    sampler, out = Gated(), []
    w = writer(sampler, keep=keep)
    w.load(parcel(0), True)
    thread = threading.Thread(target=lambda: out.append(w.write([job(1)], 0)))
    thread.start()
    assert sampler.reached.wait(DEADLINE_S)
    assert w.load(parcel(1)) == Held(None)
    sampler.go.set()
    thread.join(DEADLINE_S)
    assert versions(out[0]) == [seen]
    assert versions(w.write([job(2)], 1)) == [[1]]


def test_weights_that_never_come_meet_the_deadline():
    w = writer(wait_s=0.1)
    w.load(parcel(0), True)
    answer = w.write([job(1)], 1)
    assert isinstance(answer, Failure)
    assert answer.line.startswith("rollout worker: got no weights of version 1 after 0.1 s")


def test_a_first_load_waits_for_a_busy_sampler_no_longer_than_the_deadline():
    sampler = Gated()
    w = writer(sampler, wait_s=0.1)
    w.load(parcel(0), True)
    thread = threading.Thread(target=lambda: w.write([job(1)], 0))
    thread.start()
    assert sampler.reached.wait(DEADLINE_S)
    answer = w.load(parcel(1), True)
    assert isinstance(answer, Failure)
    assert "still busy after 0.1 s" in answer.line
    sampler.go.set()
    thread.join(DEADLINE_S)


def test_calls_in_another_order_make_the_sampler_once():
    count = []

    def make():
        count.append(1)
        return FakeSampler(torch.zeros(V, V))

    w = Writer(make, keep=True, wait_s=DEADLINE_S)
    assert w.load(parcel(0), True) == Held(0)
    assert versions(w.write([job(1)], 0)) == [[0]]
    assert isinstance(w.start(), Started)
    assert count == [1]


def test_errors_are_answers_in_one_line_and_the_worker_lives_on():
    w = writer()
    w.load(parcel(0), True)
    answer = w.load(pack({"other": torch.zeros(1)}, 1), True)
    assert isinstance(answer, Failure)
    assert answer.line.startswith("FakeSampler.load: got")
    assert "\n" not in answer.line
    again = Writer(lambda: 1 / 0, keep=True, wait_s=1.0).start()
    assert again == Failure("ZeroDivisionError: division by zero")


def test_a_failed_group_does_not_come_again_with_the_next():
    w = writer()
    w.load(pack({"logits": torch.full((V, V), float("nan"))}, 0), True)
    assert isinstance(w.write([job(1)], 0), Failure)
    w.load(parcel(1), True)
    assert [ticket for ticket, _, _ in pickle.loads(w.write([job(2)], 1))] == [2]


def test_what_a_sampler_started_is_ended():
    sampler = FakeSampler(torch.zeros(V, V))
    ended = []
    sampler.close = lambda: ended.append(1)
    w = writer(sampler)
    w.end()
    assert ended == [1]
    writer().end()
