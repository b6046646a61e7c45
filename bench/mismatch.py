"""How far vLLM's log-probs are from the trainer's: the same weights, a float32 trainer, an engine in float32 and in bfloat16. Run where vLLM is.

.venv-vllm/bin/python -m bench.mismatch [--model FOLDER] [--prompts 16] [--dtypes float32,bfloat16]

A process for each engine. Figures are over tokens of age 0, as `nearpolicy health` gives them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import table

COLUMNS = ("tokens", "mean", "p99", "kl_k3", "kl_k1", "ratio_max", "probe")


def measure(model: str, *, dtype: str, prompts: int, group: int, tokens: int, kv_cache_gb: float, threads: int) -> dict[str, Any]:
    """One engine's figures: nats for each token of age 0."""
    from nearpolicy import build
    from nearpolicy.build_sampler import policy_logp
    from nearpolicy.health import examine

    parts = ["tiny", f"model.path={model}", "sampler.kind=vllm", f"sampler.dtype={dtype}", f"sampler.kv_cache_gb={kv_cache_gb}", "sampler.eager=true",
             "ratio.denominator=proximal", f"rollout.prompts={prompts}", f"rollout.group_size={group}", f"rollout.max_tokens={tokens}",
             "rollout.max_rows=64", "task.heldout=1", "task.max_prompt_tokens=256", f"threads={threads}"]  # fmt: skip
    config = build.config_for(parts)
    with build.assemble(config, build.model_folder(model), lambda _: None) as made:
        asked = [made.prompts.at(i) for i in range(prompts)]
        sampler: Any = made.sampler
        found = examine(made.policy, sampler, build.build_method(config), asked, made.params, n=group)
        probe = sampler.compare(lambda ids: policy_logp(made.policy, ids))
        v = found.values
        return {
            "engine": dtype, "tokens": found.tokens, "mean": v["mismatch/abs_mean"], "p99": v["mismatch/abs/p99"], "kl_k3": v["mismatch/kl_k3"],
            "kl_k1": v["mismatch/kl_k1"], "ratio_max": v["mismatch/ratio_max"], "by_position": found.by_position, "probe": probe,
            "faults": found.faults, "proven": sampler.proven, "ess": found.ess,
        }  # fmt: skip


def main() -> None:
    """Measure every dtype in a process of its own and print a table."""
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="smollm2")
    p.add_argument("--dtypes", default="float32,bfloat16")
    p.add_argument("--prompts", type=int, default=16)
    p.add_argument("--group", type=int, default=4)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--kv-cache-gb", type=float, default=1.0)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--into", type=Path)
    a = p.parse_args()
    if a.into is not None:
        spec = {"prompts": a.prompts, "group": a.group, "tokens": a.tokens, "kv_cache_gb": a.kv_cache_gb, "threads": a.threads}
        a.into.write_text(json.dumps(measure(a.model, dtype=a.dtypes, **spec)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in a.dtypes.split(","):
            into = Path(folder) / f"{dtype}.json"
            given = [x for x in sys.argv[1:] if not x.startswith("--dtypes")]
            subprocess.run([sys.executable, "-m", "bench.mismatch", *given, f"--dtypes={dtype}", f"--into={into}"], check=True)
            found = json.loads(into.read_text())
            rows.append((dtype, *(f"{found[c]:.3g}" if c != "tokens" else found[c] for c in COLUMNS)))
            shown = " ".join("-" if x != x else f"{x:.1e}" for x in found["by_position"])
            print(f"{dtype}: by tenths of the response {shown}; effective sample size {found['ess']:.3f}; "
                  f"{found['proven'][0]} of {found['proven'][1]} shown tensors proven; faults: {found['faults'] or 'none'}")  # fmt: skip
    print(table(("engine", "tokens", "mean |d|", "p99 |d|", "KL k3", "KL k1", "largest ratio", "fixed prompt, mean |d|"), rows))


if __name__ == "__main__":
    main()
