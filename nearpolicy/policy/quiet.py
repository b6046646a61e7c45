"""Silence around calls into transformers: errors arrive as one line of ours, progress as the caller's."""

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No log lines (load reports, unknown model types) and no progress bars of transformers inside; both as they were afterwards.

    Exceptions pass. The settings are the process's own: other threads are quiet meanwhile too.
    """
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL + 1)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Drops what Python code writes to stderr inside: for progress bars that have no switch. Exceptions pass."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
