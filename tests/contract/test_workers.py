"""Workers in this process against the contract (those on Ray: tests/engines/ray)."""

import pytest
from workers_suite import WorkersSuite, table

from nearpolicy.schedule.local import LocalWorkers
from nearpolicy.testing.fakes import FakeSampler


class TestLocalWorkers(WorkersSuite):
    def make(self, *, keep):
        samplers = [FakeSampler(table(0)["logits"]) for _ in range(2)]
        return LocalWorkers(samplers, capacity=4, in_flight="keep" if keep else "finish", slice_steps=9)

    @pytest.fixture
    def keep(self):
        return self.make(keep=True)

    @pytest.fixture
    def finish(self):
        return self.make(keep=False)

    def kill(self, workers, worker):
        workers.kill(worker)

    def begin(self, workers):
        workers.poll(0.0)
