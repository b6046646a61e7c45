"""A server that speaks as vLLM's does in development mode, on a transformers model of this process; and can be made to misbehave.

One token at a time and without a cache: its log-probs are those of the weights at the moment of each token, and requests stand still while it is
paused. The noise is numpy's, from the request's seed.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.torch import load_file


class FakeVllm:
    """Serves until `close`. `faults` may be changed at any time:

    release, logprobs_mode, dev, vocabulary: what it says of itself; keep_old: acknowledges new weights and keeps its own; keep_projections: takes
    the rest; no_extension: its workers cannot pack anew; status: path -> (status code, how often); hang: paths that get no answer; logp: replaces
    every log-prob; drop_logp: leaves one out; no_versions: says no version; tokens: what /tokenize gives; token: the id it writes; finish: the finish
    reason.
    """

    def __init__(self, model, tokenizer, *, longest=64, packed=False):
        self.model, self.tokenizer, self.longest, self.packed = model.eval(), tokenizer, longest, packed
        self.hold: int | None = None
        """Tokens after which every response waits for `release`; None lets them run to their end."""
        self.held: set[str] = set()
        """Requests that wait there, or did."""
        self._released = threading.Event()
        self.tied = False
        self.weight_version, self.faults, self.seen = "default", {}, []
        self.running = threading.Event()
        self.running.set()
        self.aborted: set[str] = set()
        self._forward, self._step = threading.Lock(), threading.Lock()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}
        self._closing = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                fake._handle(self, None)

            def do_POST(self):
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake._handle(self, json.loads(text) if text else {})

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self):
        """Stop serving."""
        self._closing.set()
        self.running.set()
        self._server.shutdown()
        self._server.server_close()

    def release(self):
        """Let the responses that wait at `hold` go on."""
        self._released.set()

    def paths(self):
        """The paths asked for so far, in order, without their queries."""
        return [path for path, _ in self.seen]

    def _handle(self, handler, body):
        url = urlsplit(handler.path)
        self.seen.append((url.path, body))
        code, times = self.faults.get("status", {}).get(url.path, (200, 0))
        if url.path in self.faults.get("hang", ()):
            self._closing.wait(30)
            return
        if times > 0:
            self.faults["status"][url.path] = (code, times - 1)
            self._answer(handler, code, {"error": "the engine is dead"})
            return
        routes = {
            "/version": lambda: {"version": self.faults.get("release", "0.32.0")},
            "/v1/models": lambda: {"data": [{"id": "served", "max_model_len": self.longest}]},
            "/inference/v1/generate": lambda: self._generate(body),
            "/tokenize": lambda: {"tokens": self.faults["tokens"] if "tokens" in self.faults else self.tokenizer.encode(body["prompt"])},
        }
        dev = {
            "/server_info": self._info,
            "/pause": self._pause,
            "/resume": lambda: self.running.set() or {"status": "resumed"},
            "/collective_rpc": lambda: {"results": [0]} if body["method"] == "nearpolicy_pack" else self._reload(body["kwargs"]["weights_path"]),
            "/reset_prefix_cache": lambda: {"success": True},
            "/update_weight_version": lambda: setattr(self, "weight_version", body["new_version"]) or {"success": True},
            "/weight_info": lambda: {"weight_version": self.weight_version},
            "/weight_checker": lambda: {"checksums": self._digests()},
            "/abort_requests": lambda: self.aborted.update(body["request_ids"]) or {"status": "aborted"},
        }
        if self.faults.get("dev", True):
            routes |= dev
        vocabulary = self.faults.get("vocabulary", self.model.config.vocab_size)
        asked = (body or {}).get("sampling_params", {}).get("logprob_token_ids", ())
        if url.path == "/inference/v1/generate" and any(i >= vocabulary for i in asked):
            message = f"token_id(s) {asked} in logprob_token_ids contain out-of-vocab token ids. Vocabulary size: {vocabulary}"
            self._answer(handler, 400, {"error": {"message": message}})
            return
        if body and body.get("method") == "nearpolicy_pack" and self.faults.get("no_extension"):
            self._answer(handler, 500, {"error": "'Worker' object has no attribute 'nearpolicy_pack'"})
            return
        if url.path not in routes:
            self._answer(handler, 404, {"detail": "Not Found"})
            return
        self._answer(handler, 200, routes[url.path]())

    def _answer(self, handler, code, value):
        data = json.dumps(value).encode()
        handler.send_response(code)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _info(self):
        config = {"dtype": "torch.float32", "logprobs_mode": self.faults.get("logprobs_mode", "processed_logprobs"), "skip_tokenizer_init": False}
        return {"vllm_config": {"model_config": config}}

    def _pause(self):
        with self._step:
            self.running.clear()
        return {"status": "paused"}

    def _reload(self, folder):
        if self.faults.get("keep_old"):
            return {"results": [None]}
        found = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            found |= load_file(file)
        if self.faults.get("keep_projections"):
            found = {name: value for name, value in found.items() if "_proj" not in name}
        with self._forward:
            self._known.clear()
            self.model.load_state_dict(found, strict=False)
            self.model.tie_weights()
        return {"results": [None]}

    def _digests(self):
        own = {name: value.detach() for name, value in self.model.state_dict().items()}
        shown = {}
        for name, value in own.items():
            if name.endswith("embed_tokens.weight"):
                value = torch.cat([value, value.new_zeros(-len(value) % 64, value.shape[1])])
            if self.tied and name == "lm_head.weight":
                continue
            if ".k_proj." in name or ".v_proj." in name or ".up_proj." in name:
                continue
            for first, fused, rest in ((".q_proj.", ".qkv_proj.", (".k_proj.", ".v_proj.")), (".gate_proj.", ".gate_up_proj.", (".up_proj.",))):
                if first in name:
                    value = torch.cat([value, *(own[name.replace(first, other)] for other in rest)])
                    name = name.replace(first, fused)
            data = b"" if self.packed and "_proj" in name else value.contiguous().numpy().tobytes()
            shown[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(data).hexdigest()
        return shown

    def _generate(self, body):
        params, ids = body["sampling_params"], list(body["token_ids"])
        if params.get("prompt_logprobs") is not None:
            values = [self.faults.get("logp", float(self._logits(ids[:t]).log_softmax(-1)[i])) for t, i in enumerate(ids) if t]
            return {"choices": [], "prompt_logprobs": [None, *({str(i): {"logprob": v}} for i, v in zip(ids[1:], values, strict=True))]}
        rng = np.random.default_rng(params["seed"])
        out, content, starts, finish = [], [], [], None  # what is written; a fault may show other ids
        name = f"generate-tokens-{body['request_id']}"
        while finish is None:
            if self.hold == len(out):
                self.held.add(name)
                while not (self._released.wait(0.01) or self._closing.is_set() or name in self.aborted):
                    pass
            self.running.wait(60)
            if self._closing.is_set() or name in self.aborted:
                finish = "abort"
                break
            with self._step:  # no token straddles a pause
                if not self.running.is_set():
                    continue
                token, logp = self._draw(self._logits([*ids, *out]), params, rng)
                if not starts or starts[-1][0] != self.weight_version:
                    starts.append((self.weight_version, len(out)))
            out.append(token)
            content.append({"token_id": token, "logprob": self.faults.get("logp", logp if np.isfinite(logp) else -9999.0)})
            text = self.tokenizer.decode(out) if params["stop"] else ""
            if token in params["stop_token_ids"] or any(stop in text for stop in params["stop"] or ()):
                finish = "stop"
            elif len(out) >= params["max_tokens"]:
                finish = "length"
        ends = [start for _, start in starts[1:]] + [len(out)] * bool(starts)  # none when aborted before the first token
        choice = {
            "index": 0, "token_ids": [self.faults.get("token", token) for token in out], "finish_reason": self.faults.get("finish", finish),
            "logprobs": {"content": content[: -1 if self.faults.get("drop_logp") else None]},
            "weight_versions": None if self.faults.get("no_versions") else [
                {"version": v, "start": s, "end": e} for (v, s), e in zip(starts, ends, strict=True)
            ],
        }  # fmt: skip
        return {"choices": [choice]}

    def _logits(self, ids):
        """Of the next token; contexts of these weights are remembered."""
        with self._forward, torch.no_grad():
            if tuple(ids) not in self._known:
                self._known[tuple(ids)] = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            return self._known[tuple(ids)]

    def _draw(self, row, params, rng):
        greedy = params["temperature"] == 0
        row = row.double() / (1.0 if greedy else params["temperature"])
        order = row.argsort(descending=True)
        keep = torch.ones_like(row, dtype=torch.bool)
        if params["top_k"]:
            keep[order[params["top_k"] :]] = False
        before = row.masked_fill(~keep, float("-inf")).softmax(-1)[order].cumsum(-1)
        keep[order[1:][before[:-1] >= params["top_p"]]] = False
        logp = row.masked_fill(~keep, float("-inf")).log_softmax(-1)
        if not bool(logp.exp().sum().isfinite()):
            return 0, float("nan")
        mass = logp.exp().numpy()
        token = int(logp.argmax()) if greedy else int(rng.choice(len(mass), p=mass / mass.sum()))
        return token, float(logp[token])
