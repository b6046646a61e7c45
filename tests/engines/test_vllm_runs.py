"""A whole run on vLLM: sync training, evaluation by the same engine, resume. `make test-vllm`."""

import json
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

if not os.environ.get("NEARPOLICY_VLLM") or find_spec("vllm") is None:
    pytest.skip("make test-vllm runs these in an environment that holds vLLM", allow_module_level=True)

from nearpolicy.build import SHIPPED, config_for, train
from nearpolicy.policy.loading import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The shipped model's tokenizer and size, with heads that vLLM's CPU kernels take."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = Qwen3Config.from_pretrained(SHIPPED["tiny"])
    config.head_dim, config.num_attention_heads, config.num_key_value_heads = 32, 2, 1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(SHIPPED["tiny"]).save_pretrained(folder)
    return folder


def overrides(model, *more):
    return ["tiny", f"model.path={model}", "sampler.kind=vllm", "sampler.kv_cache_gb=0.25", "sampler.eager=true", "ratio.denominator=proximal",
            "rollout.prompts=8", "rollout.group_size=4", "rollout.max_tokens=24", "task.heldout=16", "task.max_prompt_tokens=64", "threads=1",
            "schedule.updates_per_rollout=2", *more]  # fmt: skip


def test_a_sync_run(model, tmp_path):
    """Four updates, two publications after the first; evaluated by the same engine; resumed for two more."""
    said = []
    parts = overrides(model, "train.steps=4", "eval.every=2", "checkpoint.every=4")
    train(config_for(parts), tmp_path / "run", say=said.append)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    apart = [row["mismatch/abs_mean"] for row in rows if "mismatch/abs_mean" in row]
    assert apart
    assert max(apart) < 1e-3  # two engines, one model, float32
    assert {"eval/pass@1", "eval/avg@4"} & {name for row in rows for name in row}
    assert all(np.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    assert not any("computes otherwise" in line for line in said)
    more = overrides(model, "train.steps=6", "eval.every=2", "checkpoint.every=4")
    train(config_for(more), tmp_path / "run", resume=True, say=said.append)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["step"]) == ("finished", 6)
