"""Workers on a local Ray against the contract, and what only processes can do: lie, raise, hang, die."""

import os
import signal
import time

import pytest
import torch
from workers_suite import DEADLINE_S, WorkersSuite, collect, job, table

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.schedule.ray import RayOptions, RayWorkers
from nearpolicy.schedule.workers import Died, usable_cpus


def options(**changes):
    given = {"workers": 1, "cpus": 1, "gpus": 0.0, "groups": 4, "keep": True, "wait_s": 60.0, "address": None, "store_mb": 128, "restarts": 3}
    return RayOptions(**(given | changes))


class Gate:
    """Files by which a test holds samplers of other processes after their fifth token, and sees that they stand there."""

    def __init__(self, folder):
        self.hold, self.reached = folder / "hold", folder / "reached"

    def wait(self):
        end = time.monotonic() + DEADLINE_S
        while not self.reached.exists():
            assert time.monotonic() < end, "nobody began to write"
            time.sleep(0.01)


def from_tables(gate=None):
    """A factory of samplers from tables. Made here, so that it travels by value."""
    hold, reached = (None, None) if gate is None else (gate.hold, gate.reached)

    def make():
        from nearpolicy.testing.fakes import FakeSampler

        class Gated(FakeSampler):
            def sample(self, requests, n, params, *, interrupt=None, refresh=None):
                steps = 0

                def stop():
                    nonlocal steps
                    steps += 1
                    while steps > 5 and hold.exists():
                        reached.touch()
                        time.sleep(0.01)
                    return interrupt is not None and interrupt()

                return super().sample(requests, n, params, interrupt=stop, refresh=refresh)

        return (FakeSampler if hold is None else Gated)(table(0)["logits"])

    import workers_suite
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(workers_suite)
    return make


@pytest.fixture(scope="module")
def local_ray():
    """One Ray for the module: workers that find it running join it."""
    first = RayWorkers(from_tables(), options=options())
    yield first._folder
    first.close()


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def two(local_ray, gate):
    """Workers that keep responses in flight, and workers that finish them. One CPU each could be too many for the machine, so they take none."""
    kinds = {keep: RayWorkers(from_tables(gate), options=options(workers=2, cpus=0, keep=keep)) for keep in (True, False)}
    yield kinds
    for workers in kinds.values():
        workers.close()


class TestRayWorkers(WorkersSuite):
    @pytest.fixture
    def keep(self, two):
        return two[True]

    @pytest.fixture
    def finish(self, two):
        return two[False]

    def kill(self, workers, worker):
        os.kill(workers._workers[worker].pid, signal.SIGKILL)

    @pytest.fixture(autouse=True)
    def _gate(self, gate):
        self.gate = gate
        yield
        self.release()

    def hold(self):
        self.gate.reached.unlink(missing_ok=True)  # a sampler may have stood there once more while it was let go
        self.gate.hold.touch()

    def begin(self, workers):
        self.gate.wait()

    def arrived(self, workers):
        end = time.monotonic() + DEADLINE_S
        while any(what == "load" for w in workers._workers for what, _ in w.calls.values()):
            assert time.monotonic() < end, "a publication did not arrive"
            assert workers.poll(0.1) == []

    def release(self):
        for file in (self.gate.hold, self.gate.reached):
            file.unlink(missing_ok=True)


def made(make, **changes):
    return RayWorkers(make, options=options(cpus=0, **changes))


def test_a_worker_that_raises_is_quoted_in_one_line(local_ray):
    def make():
        raise RuntimeError("no model\nhere")

    workers = made(make)
    with pytest.raises(EngineError, match=r"rollout worker 0.*RuntimeError: no model here") as caught:
        workers.publish(table(0), 0)
    assert "\n" not in str(caught.value)
    workers.close()


def test_an_error_while_sampling_surfaces(local_ray):
    workers = made(from_tables())
    workers.publish({"logits": torch.full((6, 6), float("nan"))}, 0)
    workers.submit(0, [job(1)])
    with pytest.raises(EngineError, match=r"rollout worker 0 \(pid \d+ on .*non-finite logits"):
        collect(workers, [1])
    workers.close()


def lying():
    def make():
        import torch

        class Liar:
            version = 0
            model = torch.nn.Linear(2, 2)

            def load(self, weights, version):
                if version == 1:
                    self.model.load_state_dict(weights)
                self.version = version

        return Liar()

    return make


def test_an_engine_that_keeps_old_weights_is_refused(local_ray):
    workers = made(lying())
    weights = {name: torch.ones_like(value) for name, value in torch.nn.Linear(2, 2).state_dict().items()}
    workers.publish(weights, 1)
    workers.publish({name: value + 1 for name, value in weights.items()}, 2)
    with pytest.raises(EngineError, match=r"other values in 'weight' than those of version 2"):
        workers.poll(DEADLINE_S)
    workers.close()


def test_an_engine_that_never_answers_meets_a_deadline(local_ray):
    def make():
        import time

        time.sleep(1000)

    workers = made(make, wait_s=2.0)
    with pytest.raises(EngineError, match=r"rollout worker 0.*no answer to '(start|load)'"):
        workers.publish(table(0), 0)
    workers.close()


def test_a_worker_that_dies_again_and_again_ends_the_run(local_ray):
    def make():
        import os

        os._exit(3)

    workers = made(make, restarts=1)
    with pytest.raises(EngineError, match="2 deaths in a row without a finished group"):
        workers.publish(table(0), 0)
    workers.close()


def shared_mb():
    """Pages of the object store that this process has written: freed ones are written again before fresh ones."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssShmem"))


def heavy():
    def make():
        import torch

        class Heavy:
            def __init__(self):
                self.model, self.version = torch.nn.Linear(1024, 2048, bias=False), 0

            def adopt(self, weights, version):
                from nearpolicy.sampler.publish import adopt_weights

                adopt_weights(self.model, weights)
                self.version = version

        return Heavy()

    return make


def test_publications_are_freed(local_ray):
    """40 versions of 8 MiB go through a store of 128 MiB (Ray frees once a second), and nothing is put aside on the disk."""
    workers = made(heavy())
    for version in range(40):
        workers.publish({"weight": torch.full((2048, 1024), float(version))}, version)
        workers.poll(0.1)
    end = time.monotonic() + DEADLINE_S
    while workers._workers[0].calls:
        assert time.monotonic() < end
        workers.poll(0.1)
    assert shared_mb() < 128
    assert [p for p in local_ray.rglob("ray_spilled*/*") if p.is_file()] == []
    workers.close()


def test_too_few_cpus_are_refused(local_ray):
    with pytest.raises(
        UsageError, match=rf"{usable_cpus() + 1} x 1 = {usable_cpus() + 1} CPUs; expected at most the {usable_cpus()} of this machine"
    ):
        RayWorkers(from_tables(), options=options(workers=usable_cpus() + 1))


def test_death_between_jobs_is_noticed_with_the_next(local_ray):
    workers = made(from_tables())
    workers.publish(table(0), 0)
    os.kill(workers._workers[0].pid, signal.SIGKILL)
    workers.submit(0, [job(1)])
    (event,) = collect(workers, [1])
    assert isinstance(event, Died)
    workers.submit(0, [job(1, attempt=1)])
    (event,) = collect(workers, [1])
    assert len(event.rollouts) == 2
    workers.close()
