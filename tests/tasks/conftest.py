"""Fixtures of the tests of tasks."""

import pytest

from nearpolicy.tasks import sandbox


@pytest.fixture
def nowhere(monkeypatch):
    """A machine without bubblewrap, as far as this process sees."""
    sandbox.unavailable.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda *_, **__: None)
    yield
    sandbox.unavailable.cache_clear()
