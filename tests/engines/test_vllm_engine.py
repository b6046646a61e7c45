"""The contract on vLLM itself, in this process's care and behind its own server, and what only a real engine shows. `make test-vllm`."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from nearpolicy.errors import EngineError
from nearpolicy.jsonhttp import JsonServer
from nearpolicy.sampler.continuation import Flight
from nearpolicy.sampler.vllm import LocalEngine, LocalOptions
from nearpolicy.sampler.vllm_calls import EXTENSION
from nearpolicy.sampler.vllm_sampler import VllmSampler
from nearpolicy.sampler.vllm_server import KEY, ServerEngine
from tests.contract.sampler_suite import mixed_requests, params, request
from tests.contract.test_samplers import TorchSuite, _constant_head

if not os.environ.get("NEARPOLICY_VLLM") or find_spec("vllm") is None:
    pytest.skip("make test-vllm runs these in an environment that holds vLLM", allow_module_level=True)

from tests.engines.vllm_models import letters, model_of, scores, write

START_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def local(folder):
    options = LocalOptions(dtype="float32", max_rows=64, longest=64, kv_cache_gb=0.25, gpu_memory=0.3, ranks=1, timeout=START_S, eager=True)
    engine = LocalEngine(folder, options)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1", "--port", str(port),
             "--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(2**28),
             "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out", "--enforce-eager",
             "--worker-extension-cls", EXTENSION],
            env=environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/version", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


class _Sampler(VllmSampler):
    """Keeps a transformers model with the same weights, for the suite's reference."""

    def __init__(self, engine, tokenizer, **options):
        super().__init__(engine, tokenizer, **options)
        self.model = model_of()

    def load(self, weights, version):
        super().load(weights, version)
        self.model.load_state_dict(weights)


class _Engine(TorchSuite):
    own_noise = False
    entropies = False
    filtered_logp = True
    tolerance = 2e-4

    def make(self, max_rows=64):
        sampler = _Sampler(self.engine, letters(), folder=self.folder, version=0)
        sampler.load(model_of().state_dict(), 0)
        return sampler

    def constant(self, sampler, logits):
        return _constant_head(sampler.model, logits)

    def other(self, sampler):
        return model_of(1).state_dict()

    def test_requests_in_flight_over_a_publication(self):
        """Frozen, computed anew under the new weights, and gone on with: each token's log-prob is that of its own version."""
        sampler = self.make()
        before, after = model_of(0).state_dict(), model_of(1).state_dict()
        for _ in range(8):  # until the publication falls inside
            sampler.load(before, 0)
            done = []
            writer = threading.Thread(target=lambda s=sampler, d=done: d.extend(s.sample(mixed_requests(), 4, params(max_tokens=50))))
            writer.start()
            time.sleep(0.1)
            sampler.load(after, 3)
            writer.join(60)
            assert len(done) == 20
            if {v for r in done for v in r.version_T.tolist()} == {0, 3}:
                break
        rows = {0: model_of(0).eval(), 3: model_of(1).eval()}
        assert {v for r in done for v in r.version_T.tolist()} == {0, 3}
        for r in done:
            versions = r.version_T.tolist()
            assert versions == sorted(versions)
            ids = torch.tensor([[*r.prompt_P.tolist(), *r.response_T.tolist()]])
            with torch.no_grad():
                logp = {v: m(ids).logits[0].log_softmax(-1)[len(r.prompt_P) - 1 : -1] for v, m in rows.items()}
            want = [float(logp[v][t, i]) for t, (v, i) in enumerate(zip(versions, r.response_T.tolist(), strict=True))]
            np.testing.assert_allclose(r.logp_behavior_T, want, atol=self.tolerance)

    def test_an_interrupted_flight_goes_on_under_new_weights(self):
        sampler = self.make()
        flight = Flight(sampler)
        flight.add(mixed_requests(), 4, params(max_tokens=50))
        start = time.monotonic()
        first = dict(flight.run(lambda: time.monotonic() - start > 0.1))
        sampler.load(model_of(1).state_dict(), 3)
        done = {**first, **dict(flight.run())}
        assert sorted(done) == [0, 1, 2, 3, 4]
        assert all(len(r.response_T) == 50 for group in done.values() for r in group)
        assert 3 in {v for group in done.values() for r in group for v in r.version_T.tolist()}

    def test_an_engine_that_keeps_old_weights_is_refused(self, monkeypatch):
        sampler = self.make()
        monkeypatch.setattr(sampler.engine, "replace", lambda folder, version: sampler.engine.name(version))
        with pytest.raises(EngineError, match="acknowledged an update and kept other weights"):
            sampler.load(model_of(1).state_dict(), 1)
        monkeypatch.undo()
        with pytest.raises(EngineError, match="last update failed"):
            sampler.sample([request(0)], 1, params())

    def test_a_fixed_prompt_sees_what_digests_do_not(self):
        """The projections alone change (as with merged adapters): a CPU build shows them as empty."""
        sampler = self.make()
        base, changed = model_of().state_dict(), model_of().state_dict()
        for name in changed:
            if "_proj" in name:
                changed[name] = changed[name] * 1.3
        assert sampler.compare(scores(model_of(), base)) < 1e-4
        sampler.load(changed, 1)
        assert sampler.compare(scores(model_of(), changed)) < 1e-4
        with pytest.raises(EngineError, match="fixed prompt"):
            sampler.compare(scores(model_of(), base))

    def test_a_folder_that_cannot_be_read(self, tmp_path):
        sampler = self.make()
        with pytest.raises(EngineError):
            sampler.engine.replace(tmp_path / "nothing", 1)
        sampler.load(model_of(1).state_dict(), 2)
        assert len(sampler.sample([request(0)], 1, params())[0].response_T) == 6

    def test_publication_takes_seconds_at_most(self):
        sampler = self.make()
        start = time.monotonic()
        sampler.load(model_of(1).state_dict(), 2)
        assert time.monotonic() - start < 20

    def test_non_finite_logits_name_prompt_and_token(self):
        """Last: what NaN weights wrote into vLLM's cache stays in its memory, and spoils what is read beside it."""
        sampler = self.make()
        sampler.load({name: torch.full_like(value, float("nan")) for name, value in model_of().state_dict().items()}, 1)
        with pytest.raises(EngineError, match=r"prompt 'p4'.*response token 0"):
            sampler.sample([request(4)], 2, params())


class TestLocal(_Engine):
    @pytest.fixture(autouse=True)
    def _engine(self, local, folder):
        self.engine, self.folder = local, folder


class TestServer(_Engine):
    @pytest.fixture(autouse=True)
    def _engine(self, served, folder):
        engine = ServerEngine(JsonServer(name="sampler.server", url=served, timeout=120.0, retries=0, key=KEY), max_rows=64)
        engine.check_tokenizer(letters())
        self.engine, self.folder = engine, folder
        yield
        engine.close()


def descendants(root):
    """Living processes below `root`, zombies left out."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry)] = int(parent)
    found, new = set(), {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def test_a_closed_engine_leaves_no_process_behind(folder):
    before = descendants(os.getpid())
    engine = LocalEngine(folder, LocalOptions(dtype="float32", max_rows=8, longest=64, kv_cache_gb=0.25, gpu_memory=0.3, ranks=1, timeout=START_S,
                                              eager=True))  # fmt: skip
    tracker = b"multiprocessing.resource_tracker"  # Python's own, which ends with this process
    own = {pid for pid in descendants(os.getpid()) - before if tracker not in Path(f"/proc/{pid}/cmdline").read_bytes()}
    assert own
    engine.close()
    engine.close()
    until = time.monotonic() + 30
    while (left := {pid for pid in own if os.path.exists(f"/proc/{pid}")} & descendants(os.getpid())) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
