"""Teachers: vocabularies compared in full, scoring in this process and over HTTP, routes, what is refused."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from nearpolicy.errors import CheckpointError, DataError, EngineError, UsageError
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import load_model
from nearpolicy.policy.teacher import LocalTeacher, RoutedTeacher, as_batch, checked, compare_vocabularies, load_scorer
from nearpolicy.policy.teacher_server import KEY, ServerOptions, ServerTeacher
from nearpolicy.policy.tiny import character_tokenizer, make_tiny, tiny_model
from nearpolicy.rollout import Rollout, StopReason
from nearpolicy.trainer.step import score_all


def rollout(prompt, response, *, group=0, prompt_id="p", temperature=1.0):
    T = len(response)
    return Rollout(
        prompt_id=prompt_id, group=group, sample=0, prompt_P=np.array(prompt), response_T=np.array(response, dtype=np.int64),
        logp_behavior_T=np.zeros(T, dtype=np.float32), version_T=np.zeros(T, dtype=np.int64), temperature=temperature, stop=StopReason.EOS,
    )  # fmt: skip


ROLLOUTS = [
    rollout([5, 6, 7], [8, 9, 1]), rollout([5, 6, 7], [10, 1]), rollout([4, 4], [], group=1, prompt_id="q"),
    rollout([9], [3, 3, 3, 3, 3, 1], group=2, prompt_id="r"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("m") / "student", seed=1)


@pytest.fixture
def policy():
    return HFPolicy(tiny_model(seed=1), tokenizer=character_tokenizer())


def by_hand(model, r, temperature=1.0):
    ids = torch.tensor([[*r.prompt_P, *r.response_T]])
    with torch.no_grad():
        logp = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    P = len(r.prompt_P)
    return np.array([float(logp[P + t - 1, token]) for t, token in enumerate(r.response_T)])


@pytest.mark.parametrize("budget", [16384, 8])
def test_one_log_prob_for_each_response_token_whatever_the_parts(folder, budget):
    model, _ = load_model(folder)
    teacher = LocalTeacher(HFPolicy(model, token_budget=budget))
    scored = checked(teacher)(ROLLOUTS)
    for r, logp_T in zip(ROLLOUTS, scored, strict=True):
        assert logp_T.dtype == np.float32
        assert np.allclose(logp_T, by_hand(model, r), atol=1e-5)
    assert teacher.score([]) == []


def test_the_teacher_is_the_student_to_the_last_bit_on_equal_weights(folder, policy):
    teacher = LocalTeacher(load_scorer(folder, device="cpu", dtype=None, student=policy, token_budget=policy.token_budget))
    want = score_all(policy, as_batch(ROLLOUTS))
    got = np.concatenate(teacher.score(ROLLOUTS))
    assert np.array_equal(got, want[as_batch(ROLLOUTS).response_mask_BT].numpy())


def test_temperature_is_the_rollouts_or_the_teachers_own(folder):
    model, _ = load_model(folder)
    warm = rollout([5, 6], [7, 8, 1], temperature=2.0)
    assert np.allclose(LocalTeacher(HFPolicy(model)).score([warm])[0], by_hand(model, warm, 2.0), atol=1e-5)
    assert np.allclose(LocalTeacher(HFPolicy(model), temperature=0.5).score([warm])[0], by_hand(model, warm, 0.5), atol=1e-5)


def test_half_precision_weights_take_half_the_room(folder, policy):
    scorer = load_scorer(folder, device="cpu", dtype="bfloat16", student=policy, token_budget=64)
    assert {p.dtype for p in scorer.model.parameters()} == {torch.bfloat16}
    assert np.allclose(LocalTeacher(scorer).score(ROLLOUTS)[0], score_all(policy, as_batch(ROLLOUTS))[0][3:6], atol=0.1)


class Fixed:
    def __init__(self, value):
        self.value, self.calls = value, []

    def score(self, rollouts):
        self.calls.append([r.prompt_id for r in rollouts])
        return [np.full(len(r.response_T), self.value, dtype=np.float32) for r in rollouts]


def test_routes_ask_each_teacher_once_and_put_answers_in_place():
    a, b = Fixed(-1.0), Fixed(-2.0)
    routed = RoutedTeacher({"a": a, "b": b}, {"p": "a", "q": "b", "r": "b"})
    assert [x.tolist() for x in checked(routed)(ROLLOUTS)] == [[-1.0] * 3, [-1.0] * 2, [], [-2.0] * 6]
    assert (a.calls, b.calls) == ([["p", "p"]], [["q", "r"]])
    with pytest.raises(DataError, match="'p'"):
        RoutedTeacher({"b": b}, {"q": "b"}).score(ROLLOUTS)


# ------------------------------------------------------------------------------------------------------------- vocabularies


def changed(folder, target, change):
    """A copy of the model folder with another map; `change` edits the map text -> id."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer["model"]["vocab"])
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def test_equal_vocabularies_pass_and_read_no_weights(folder, tmp_path):
    other = changed(folder, tmp_path / "same", lambda vocab: None)
    (other / "model.safetensors").write_bytes(b"not weights")
    compare_vocabularies(folder, other, what="teacher.path")


def test_two_swapped_ids_are_found_and_the_first_is_named(folder, tmp_path):
    def swap(vocab):
        vocab["3"], vocab["7"] = vocab["7"], vocab["3"]

    other = changed(folder, tmp_path / "swapped", swap)
    first = character_tokenizer().get_vocab()["3"]
    with pytest.raises(CheckpointError, match=f"2 of 32 ids that differ; the first is id {first}: student '3', teacher.path '7'"):
        compare_vocabularies(folder, other, what="teacher.path")


def test_a_missing_token_and_another_tokenizer_are_found(folder, tmp_path):
    other = changed(folder, tmp_path / "less", lambda vocab: vocab.pop("7"))
    with pytest.raises(CheckpointError, match=r"1 of 32 ids.*student '7', teacher.path nothing"):
        compare_vocabularies(folder, other, what="teacher.path")


def resized(folder, target, rows):
    model = tiny_model(seed=1, vocab_size=rows)
    model.save_pretrained(target)
    character_tokenizer().save_pretrained(target)
    return target


def test_a_longer_output_layer_is_refused_or_cut(folder, tmp_path, policy):
    longer = resized(folder, tmp_path / "longer", 40)
    with pytest.raises(CheckpointError, match="40 rows for 32 tokens"):
        compare_vocabularies(folder, longer, what="teacher.path")
    compare_vocabularies(folder, longer, what="teacher.path", extra_rows="drop")
    teacher = LocalTeacher(load_scorer(longer, device="cpu", dtype=None, student=policy, token_budget=64, extra_rows="drop"))
    plain, _ = load_model(longer)
    r = ROLLOUTS[0]
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[*r.prompt_P, *r.response_T]])).logits[0, :, :32]
    want = [float(logits.log_softmax(-1)[2 + t, token]) for t, token in enumerate(r.response_T)]
    assert np.allclose(teacher.score([r])[0], want, atol=1e-5)
    compare_vocabularies(longer, longer, what="teacher.path")  # both padded alike
    with pytest.raises(CheckpointError, match="32 rows for a student of 40"):
        compare_vocabularies(longer, folder, what="teacher.path")


# ------------------------------------------------------------------------------------------------------------------ server


class Answers(BaseHTTPRequestHandler):
    """vLLM's interface over the exact log-probs of a tiny model; `faults` are played before good answers."""

    model = None
    faults: list = []  # noqa: RUF012
    seen: list = []  # noqa: RUF012

    def log_message(self, *args):
        pass

    def reply(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(BrokenPipeError):  # the client gave up
            self.end_headers()
            self.wfile.write(body)

    def do_GET(self):
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((body, self.headers.get("Authorization")))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            self.reply(fault, {"error": "no"})
            return
        if fault == "slow":
            time.sleep(1.0)
        choices = []
        for index, ids in enumerate(body["prompt"]):
            with torch.no_grad():
                logp = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            entries = [None] + [{str(ids[t]): {"logprob": float(logp[t - 1, ids[t]])}, "0": {"logprob": -9.0}} for t in range(1, len(ids))]
            choices.append({"index": index, "prompt_logprobs": entries})
        if fault == "short":
            choices[0]["prompt_logprobs"].pop()
        elif fault == "no token":
            choices[0]["prompt_logprobs"][-1] = {"0": {"logprob": -1.0}}
        elif fault == "null":
            choices[0]["prompt_logprobs"] = None
        elif fault == "fewer":
            choices.pop()
        self.reply(200, {"choices": choices[::-1]})


@pytest.fixture
def server(folder):
    Answers.model, Answers.faults, Answers.seen = load_model(folder)[0], [], []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def ask(url, *, budget=1000, retries=0, timeout=10.0, model=None):
    said, waits = [], []
    options = ServerOptions(url=url, model=model, token_budget=budget, timeout=timeout, retries=retries)
    return ServerTeacher(options, pause=waits.append, say=said.append), said, waits


def test_a_server_gives_the_models_log_probs_in_requests_of_the_budget(server):
    teacher, _, _ = ask(server + "/v1/", budget=9)
    scored = checked(teacher)(ROLLOUTS)
    for r, logp_T in zip(ROLLOUTS, scored, strict=True):
        assert np.allclose(logp_T, by_hand(Answers.model, r), atol=1e-6)
    assert [[len(ids) for ids in body["prompt"]] for body, _ in Answers.seen] == [[6], [5], [7]]  # the empty response is not sent
    assert all(body["model"] == "tiny" and body["prompt_logprobs"] == 1 for body, _ in Answers.seen)


def test_the_key_is_read_from_the_environment(server, monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    ask(server)[0].score(ROLLOUTS[:1])
    assert Answers.seen[-1][1] == "Bearer secret"


def test_failed_requests_are_sent_again_after_growing_pauses(server):
    teacher, said, waits = ask(server, retries=3)
    Answers.faults = [500, 503, 429]
    assert np.allclose(teacher.score(ROLLOUTS[:1])[0], by_hand(Answers.model, ROLLOUTS[0]), atol=1e-6)
    assert waits == [1.0, 2.0, 4.0]
    assert len(said) == 3


@pytest.mark.parametrize(
    ("fault", "message", "requests"),
    [
        (500, "status 500", 2), (404, "status 404", 1), ("slow", "2 times", 2), ("short", "5 positions for a sequence of 6", 1),
        ("no token", "no log-prob of token 1 at position 5", 1), ("null", "no positions", 1), ("fewer", "0 choices for 1", 1),
    ],
)  # fmt: skip
def test_what_a_server_gets_wrong_is_one_clear_line(server, fault, message, requests):
    teacher, _, _ = ask(server, retries=1, timeout=0.3)
    Answers.faults = [fault] * 2
    with pytest.raises(EngineError, match=message):
        teacher.score(ROLLOUTS[:1])
    assert len(Answers.seen) == requests


def test_servers_that_are_not_there_or_hold_another_model_are_refused(server):
    with pytest.raises(UsageError, match="http://host:port"):
        ask("localhost:8000")
    with pytest.raises(EngineError, match="the models tiny"):
        ask(server, model="large")
    with pytest.raises(EngineError, match="2 times"):
        ask("http://127.0.0.1:9", retries=1, timeout=0.5)
