"""The vLLM sampler against the contract, on a server that speaks as vLLM's does; `tests/engines` does it on vLLM itself."""

import pytest

from nearpolicy.jsonhttp import JsonServer
from nearpolicy.sampler.vllm_sampler import VllmSampler
from nearpolicy.sampler.vllm_server import KEY, ServerEngine
from tests.contract.sampler_suite import TOKENIZER
from tests.contract.test_samplers import TorchSuite, model_of
from tests.sampler.fake_vllm import FakeVllm


class _Sampler(VllmSampler):
    """Shows the model that the server computes with, for the suite's reference."""

    model = None


class TestVllmServer(TorchSuite):
    own_noise = False
    entropies = False
    filtered_logp = True

    @pytest.fixture(autouse=True)
    def _served(self, tmp_path):
        model_of(self.kind).save_pretrained(tmp_path / "model")
        self._folder, self._open = tmp_path / "model", []
        yield
        for thing in self._open:
            thing.close()

    def make(self, max_rows=32):
        fake = FakeVllm(model_of(self.kind), TOKENIZER)
        http = JsonServer(name="sampler.server", url=fake.url, timeout=60.0, retries=0, key=KEY)
        sampler = _Sampler(ServerEngine(http, max_rows=max_rows), TOKENIZER, folder=self._folder)
        sampler.model = fake.model
        self._open += [sampler, fake]
        return sampler
