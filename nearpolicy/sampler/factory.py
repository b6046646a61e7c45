"""Samplers made where they are used: a picklable description of one, for a process of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nearpolicy.policy.loading import load_model
from nearpolicy.sampler.publish import adopt_weights
from nearpolicy.sampler.torch import TorchSampler

PACKAGE = Path(__file__).resolve().parents[1]


def portable(folder: Path) -> str:
    """A folder's path as other machines find it: a shipped one by its place in the package (`PACKAGE / portable(folder)`)."""
    path = folder.resolve()
    return str(path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path)


class PublishedSampler(TorchSampler):
    """A `TorchSampler` whose model nobody else uses: it samples from published tensors where they lie, in memory that several workers share."""

    def adopt(self, weights: Mapping[str, Tensor], version: int) -> None:
        """As `load`, without a copy where `adopt_weights` needs none. The tensors must never change."""
        adopt_weights(self.model, weights)
        self._loaded_names, self.version = list(weights), version

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from a copy of these weights from now on. (A copy in place could meet adopted memory, which cannot be written to.)"""
        self.adopt({name: value.clone() for name, value in weights.items()}, version)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFactory:
    """The embedded sampler on the model of a folder."""

    folder: str
    """Path of a Hugging Face folder on the machine where the sampler is made; one inside this package is found there too."""
    bfloat16: bool
    """Store and compute in bfloat16 instead of float32."""
    device: str
    threads: int
    """CPU threads of torch in the sampler's process."""
    max_rows: int
    router_noise: float = 0.0
    """As in `TorchSampler`."""

    @classmethod
    def of(
        cls, folder: Path, *, bfloat16: bool, device: str, threads: int, max_rows: int, router_noise: float = 0.0
    ) -> "TorchFactory":  # fmt: skip
        """As the constructor, for a folder of this machine; a shipped one is named by its place in the package."""
        return cls(folder=portable(folder), bfloat16=bfloat16, device=device, threads=threads, max_rows=max_rows, router_noise=router_noise)

    def __call__(self) -> PublishedSampler:
        """The sampler; its version is 0 until weights are loaded.

        Raises:
            CheckpointError: no such folder on this machine, or no model in it.
        """
        torch.set_num_threads(self.threads)
        # The parameters go on to require gradients: torch multiplies by those that do not in another order, and the log-probs of prompts would
        # differ in their last bits from those of a sampler on the trainer's own model.
        model, tokenizer = load_model(PACKAGE / self.folder, dtype="bfloat16" if self.bfloat16 else "float32", device=self.device)
        return PublishedSampler(model, tokenizer, max_rows=self.max_rows, router_noise=self.router_noise)
