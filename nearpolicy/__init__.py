"""Train language models by reinforcement learning and on-policy distillation when the data is only nearly on-policy.

`policy_loss` and `method` are the stable surface for other trainers; they pull in torch and nothing else. Names resolve on first use,
so that reward workers and `--help` start without torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["METHODS", "Batch", "Rollout", "Scored", "__version__", "method", "policy_loss"]

if TYPE_CHECKING:
    from nearpolicy.methods import METHODS, method, policy_loss
    from nearpolicy.rollout import Batch, Rollout, Scored

_HOMES = {"METHODS": "methods", "method": "methods", "policy_loss": "methods", "Batch": "rollout", "Rollout": "rollout", "Scored": "rollout"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"nearpolicy.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'nearpolicy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
