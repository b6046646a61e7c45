"""Asynchronous training: what a publication costs beside a plain copy, and what running side by side saves.

- Publication: weights of a 135M-parameter Llama in float32 go to one rollout worker on a local Ray (put into shared memory, taken, checked by the
  worker) and, in turn, are copied once into fresh memory by torch. Both with two threads. Tied weights count once.
- Side by side: the tiny model, each phase on one thread in both runs. `rollout.max_rows` is chosen so that sampling and training cost about the
  same in the sync run; then wall time per update of sync (N = 1) and of async (one worker, K = 1, max_age = 2), in turn, without the first updates.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.common import Range, bound_verdict, run_child, run_part, table

COPIES, SHARE = 1.5, 0.65
MODEL = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
RUN = ["threads=1", "task.heldout=1", "eval.every=0", "checkpoint.every=1000", "log.rollouts_every=0", "rollout.prompts=32"]
WARM = 6
"""Updates that do not count."""


class LlamaFactory:
    """Makes the worker's sampler."""

    def __call__(self) -> Any:
        """A random model of the size of SmolLM2-135M."""
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        from nearpolicy.sampler.factory import PublishedSampler

        torch.set_num_threads(2)
        return PublishedSampler(AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)), None)


def publication(spec: dict[str, Any]) -> dict[str, Any]:
    """Child: seconds of each publication and of each plain copy."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from nearpolicy.schedule.ray import RayOptions, RayWorkers

    weights = {k: v.detach() for k, v in AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).state_dict().items()}
    unique = list({v.data_ptr(): v for v in weights.values()}.values())
    size = sum(v.numel() * v.element_size() for v in unique)
    options = RayOptions(workers=1, cpus=1, gpus=0.0, groups=1, keep=True, wait_s=300.0, address=None, store_mb=4 * size // 2**20, restarts=0)
    workers = RayWorkers(LlamaFactory(), options=options)
    out: dict[str, Any] = {"mb": size / 2**20, "publication": [], "put": [], "copy": [], "copy_in_place": []}
    try:
        workers.publish(weights, 0)
        target = [torch.empty_like(v) for v in unique]
        for version in range(1, 2 + spec["repeat"]):
            for value in unique:
                value[0] += 1e-3
            time.sleep(1.5)  # Ray frees what is no longer held once a second
            began = time.perf_counter()
            fresh = [v.clone() for v in unique]
            copied = time.perf_counter()
            for a, b in zip(target, unique, strict=True):
                a.copy_(b)
            placed = time.perf_counter()
            del fresh
            start = time.perf_counter()
            workers.publish(weights, version)
            put = time.perf_counter()
            while workers._workers[0].calls:
                workers._poll(60.0)
            end = time.perf_counter()
            if version > 1:  # the first touches memory that nobody used before
                out["publication"].append(end - start)
                out["put"].append(put - start)
                out["copy"].append(copied - began)
                out["copy_in_place"].append(placed - copied)
    finally:
        workers.close()
    return out


def training(spec: dict[str, Any]) -> dict[str, Any]:
    """Child: seconds per update of one run, and of its phases."""
    from nearpolicy import build

    schedule = {"sync": ["tiny", "schedule.updates_per_rollout=1"], "async": ["async", "schedule.sync_every=1", "schedule.max_age=2"]}[spec["kind"]]
    words = [*schedule, *RUN, f"rollout.max_rows={spec['rows']}", f"train.steps={spec['updates'] + WARM}"]
    out = Path(spec["scratch"]) / "run"
    build.train(build.config_for(words), out, say=lambda _: None, report=False)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    kept = rows[WARM:]
    return {
        "update_s": (rows[-1]["time"] - rows[WARM - 1]["time"]) / len(kept),
        "sampling": statistics.mean(row["time/sample_s"] for row in kept),
        "training": statistics.mean(row["time/update_s"] for row in kept),
        "age": statistics.mean(row["stale/age_mean"] for row in kept),
    }


def measure(*, quick: bool, pairs: int | None, model: str | None, device: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Publications, the choice of rows, then pairs of runs; the model does not matter."""
    if device != "cpu":
        raise RuntimeError("this section measures the CPU")
    sent = run_child("asynchronous", {"part": "publication", "repeat": 3 if quick else 9}, threads=2)
    say("publication: " + ", ".join(f"{p / c:.2f}x" for p, c in zip(sent["publication"], sent["copy"], strict=True)))
    updates = 10 if quick else 30
    tried = {}
    for rows in (512, 128, 64, 32):
        tried[rows] = run_child("asynchronous", {"part": "training", "kind": "sync", "rows": rows, "updates": 8}, threads=1)
        say(f"max_rows {rows}: sampling {tried[rows]['sampling']:.3f} s, training {tried[rows]['training']:.3f} s")
    chosen = min(tried, key=lambda r: abs(tried[r]["sampling"] / tried[r]["training"] - 1))
    runs: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
    for pair in range(pairs or (1 if quick else 5)):
        for kind, own in runs.items():
            own.append(run_child("asynchronous", {"part": "training", "kind": kind, "rows": chosen, "updates": updates}, threads=1))
            say(f"pair {pair + 1} {kind}: {own[-1]['update_s']:.3f} s an update")
    return {"publication": sent, "rows": chosen, "runs": runs}


def render(result: Mapping[str, Any]) -> str:
    """Markdown."""
    sent, runs = result["publication"], result["runs"]
    ratios = [p / c for p, c in zip(sent["publication"], sent["copy"], strict=True)]
    places = [p / c for p, c in zip(sent["publication"], sent["copy_in_place"], strict=True)]
    rows = [
        (kind, *(Range.of([r[key] for r in own]).text("{:.3f}") for key in ("update_s", "sampling", "training")),
         Range.of([r["age"] for r in own]).text("{:.2f}"), len(own))
        for kind, own in runs.items()
    ]  # fmt: skip
    shares = [a["update_s"] / s["update_s"] for s, a in zip(runs["sync"], runs["async"], strict=True)]
    alike = [r["sampling"] / r["training"] for r in runs["sync"]]
    return "\n".join([
        f"- publication of {sent['mb']:.0f} MB to a worker until it holds them: {Range.of(ratios).text('{:.2f}')}x of a plain copy into fresh memory "
        f"({Range.of(sent['copy']).text('{:.3f}')} s); target at most {COPIES}: **{bound_verdict(ratios, at_most=COPIES)}** "
        f"({Range.of(places).text('{:.2f}')}x of a copy into memory that is there)",
        f"- wall time per update, async against sync: {Range.of(shares).text('{:.3f}')}x; target at most {SHARE}: "
        f"**{bound_verdict(shares, at_most=SHARE)}** (sampling costs {Range.of(alike).text('{:.2f}')}x of training in the sync runs, with "
        f"rollout.max_rows = {result['rows']})",
        "", table(("run", "s an update", "sampling s", "update s", "mean age", "runs"), rows),
    ])  # fmt: skip


if __name__ == "__main__":
    run_part({"publication": publication, "training": training})
