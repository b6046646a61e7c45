"""Training from Python: a configuration, a run, its numbers, and the checkpoint as a plain transformers model.

    python examples/python_api.py

Two methods train on equally stale data; what differs between the runs is one word of the configuration.
"""

import argparse
import json
from pathlib import Path

from nearpolicy.build import config_for, train
from nearpolicy.jobs import evaluate_checkpoint


def main(words: list[str] | None = None) -> dict[str, float]:
    """Compare two methods on equally stale data; returns pass@1 of each."""
    parser = argparse.ArgumentParser(description="Train from Python.")
    parser.add_argument("--out", default="runs/python-api", type=Path, help="folder of the run directories")
    parser.add_argument("parts", nargs="*", help="further recipe names, TOML files or key=value words")
    args = parser.parse_args(words)
    result: dict[str, float] = {}
    for name in ("vespo", "reinforce"):
        out = args.out / name
        # Left to right: the recipe, then overrides. N = 16 updates on each rollout batch of 512 responses.
        config = config_for(["tiny", f"method.name={name}", "schedule.updates_per_rollout=16", "train.steps=64", *args.parts])
        train(config, out)

        # Every value of every update is a line of JSON.
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        drift = max(row["policy/kl_behavior_k3"] for row in rows if row["kind"] == "train")
        print(f"{name}: largest KL(behaviour || current) {drift:.4f} nats a token")

        # The last update always writes a checkpoint: a folder that transformers loads as it is.
        checkpoint = sorted((out / "checkpoints").iterdir())[-1]
        numbers = evaluate_checkpoint(checkpoint, samples=4, ks="1,4")
        result[name] = numbers["eval/pass@1"]
    return result


if __name__ == "__main__":
    print(main())
