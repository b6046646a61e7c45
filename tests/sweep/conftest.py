"""A sweep of known numbers."""

import numpy as np
import pytest

from experiments import METHODS, plan_of, write_run


@pytest.fixture
def random_sweep(tmp_path):
    """Two methods, four seeds, three evaluations of 20 prompts; VESPO is better by 0.1 on every prompt."""
    plan = plan_of(seeds=[0, 1, 2, 3], axis=[METHODS], compare={"baseline": {"method": "GRPO"}, "target": 0.55})
    for run in plan.runs:
        value_EP = np.random.default_rng(run.seed).uniform(0.3, 0.7, (3, 20)) + 0.1 * (run.cell.labels[0] == "VESPO")
        write_run(tmp_path, run, value_EP, prompts=f"seed {run.seed}")
    return plan, tmp_path
