"""Worked cases in float64: every gradient and weight of the oracle file, to 1e-9."""

import json
from pathlib import Path

import pytest
import torch

from nearpolicy.methods import METHODS, policy_loss

ORACLES = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())
CASES = [(f"{i}-{c['method']}-{c['label'][:40]}", c) for i, c in enumerate(ORACLES["cases"])]
TENSORS = {"mask": torch.float64, "prefix_length": torch.int64, "off_policy": torch.bool}


def tensors(case, **changes):
    return {name: torch.tensor(value, dtype=TENSORS.get(name, torch.float64)) for name, value in {**case["tensors"], **changes}.items()}


@pytest.mark.parametrize("case", [c for _, c in CASES], ids=[name for name, _ in CASES])
def test_gradient_and_weight_equal_the_worked_case(case):
    data = tensors(case)
    logp = data.pop("logp").requires_grad_()
    out = policy_loss(case["method"], logp=logp, options=case["options"], check=False, **data)  # some cases state ratios through log-probs above 0
    out.loss.backward()
    tolerance = 1e-7 if "1e-7" in case["note"] else 1e-9
    torch.testing.assert_close(logp.grad, torch.tensor(case["gradient"], dtype=torch.float64), rtol=0, atol=tolerance)
    if "weight_times_advantage" in case:
        expected = torch.tensor(case["weight_times_advantage"], dtype=torch.float64)
        torch.testing.assert_close(out.weight * out.advantage, expected, rtol=0, atol=tolerance)


def test_every_case_has_a_gradient_and_every_row_a_case():
    assert all("gradient" in c for c in ORACLES["cases"])
    assert {c["method"] for c in ORACLES["cases"]} == set(METHODS)
