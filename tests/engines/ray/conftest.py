"""Tests with a real Ray: every worker is a process that imports torch, so they have a target of their own, `make test-ray`."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "contract"))


def pytest_collection_modifyitems(items):
    if os.environ.get("NEARPOLICY_RAY") == "1":
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="make test-ray runs them (extra `ray`)"))
