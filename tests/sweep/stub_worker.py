"""A worker that trains nothing: it does what the run's name and learning rate say, in the same protocol. For tests of the driver."""

import json
import os
import signal
import sys
import time
from pathlib import Path

STOP = []


def stop(*_):
    STOP.append(1)
    if len(STOP) > 1:
        raise KeyboardInterrupt


def run(job):
    out = Path(job["out"])
    (out / "evaluations").mkdir(parents=True, exist_ok=True)
    with open(job["log"], "a") as log:
        log.write(f"running {job['name']}\n")
    method, seed = job["config"]["method"]["name"], job["config"]["seed"]
    status, message = "finished", ""
    if method == "grpo" and seed == 1:
        status, message = "failed", "loss is not finite"
    if method == "grpo" and seed == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if method == "sapo":
        while not STOP:
            time.sleep(0.01)
        status, message = "interrupted", "checkpoint written"
    (out / "status.json").write_text(json.dumps({"status": status, "step": 10, "message": message}))
    (out / "pid").write_text(str(os.getpid()))
    rows = [{"step": s, "kind": k, "time": s, **v} for s, k, v in ((0, "eval", {"eval/pass@1": 0.5}), (10, "train", {"data/tokens_sampled": 100}))]
    (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (out / "env.json").write_text("{}")
    for step in (0, 10):
        document = {"step": step, "prompts": "p", "values": {"pass@1": [0.0, 1.0]}}
        (out / "evaluations" / f"step-{step:06d}.json").write_text(json.dumps(document))
    return status, message


def sft(job):
    Path(job["out"]).mkdir()
    (Path(job["out"]) / "sft.json").write_text(json.dumps({"evaluation": {"pass@1": 0.25}}))
    return "finished", ""


def main():
    signal.signal(signal.SIGTERM, stop)
    if os.environ.get("STUB") == "broken":
        sys.exit("no such library")
    print(json.dumps({"status": "ready"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.perf_counter()
        status, message = run(job) if job["kind"] == "run" else sft(job)
        answer = {"status": status, "message": message, "seconds": time.perf_counter() - began, "score": 0.5}
        print(json.dumps(answer), flush=True)
        if status == "interrupted":
            return


main()
