"""The real pretrained model, converted and trained for two updates. Run by `make test-smollm2`; half a minute and half a gigabyte."""

import json
import os

import pytest

pytestmark = pytest.mark.skipif(not os.environ.get("NEARPOLICY_SMOLLM2"), reason="make test-smollm2 installs the model and runs this")


@pytest.mark.slow
def test_the_real_model_trains_and_comes_back(tmp_path):
    from nearpolicy.build import config_for, model_folder, train
    from nearpolicy.jobs import evaluate_checkpoint

    small = ["rollout.prompts=2", "rollout.group_size=2", "train.steps=2", "task.heldout=2", "rollout.max_tokens=8", "log.rollouts_every=1"]
    out = tmp_path / "run"
    train(config_for(["smollm2", *small]), out, say=print)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    updates = [r for r in rows if r["kind"] == "train"]
    assert [r["stale/age_max"] for r in updates] == [0, 1]
    # Sampler and trainer agree on the model: the first update's ratios are 1 up to rounding.
    assert updates[0]["ratio/outside_frac"] == 0
    assert abs(updates[0]["policy/kl_behavior_k3"]) < 1e-6
    values = evaluate_checkpoint(out / "checkpoints" / "step-000002", ["eval.samples=1"], say=print)
    assert 0 <= values["eval/pass@1"] <= 1

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2"))
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
