"""Weights on their way into a vLLM engine: written aside as a Hugging Face folder, and the proof that the engine holds them.

vLLM reloads a folder in place. What it then holds is asked for as digests of its own tensors. Some of them can be foretold exactly (embeddings,
norms, and on a GPU with one rank the fused projections too); of the others it is known whether they had to change. On a CPU vLLM packs the
projections for its matrix library and shows them as empty: they are seen by the log-probs of a fixed prompt alone.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import CheckpointError, EngineError
from nearpolicy.policy.quiet import quiet_transformers
from nearpolicy.randomness import generator
from nearpolicy.rollout import Array
from nearpolicy.sampler.weights import check_weights

STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's fused projections and what they are made of, one below the other."""
ALWAYS_SHOWN = ("embed_tokens.weight", "norm.weight")
"""Ends of names under which every engine with one rank shows a tensor as it was published, its vocabulary padded at most."""
PROBE_TOKENS = 32
PROBE_LIMITS = {"float32": 0.02, "bfloat16": 0.5, "float16": 0.2}
"""Largest mean |difference| in nats between the trainer's log-probs of the fixed prompt and those of an engine of this dtype."""
_PADDING = 64
_EMPTY = hashlib.sha256(b"").hexdigest()


class FolderWriter:
    """Writes published weights as the folder that vLLM reads: checkpoint names, the engine's dtype, tied tensors once.

    Args:
        folder: of the model that the engine was started with; gives the architecture.
        dtype: of the engine.
        where: in which folders are written; None takes the system's place for temporary files. A server must see it under the same path.
    Raises:
        CheckpointError: no model configuration in the folder.
    """

    def __init__(self, folder: Path, *, dtype: str, where: Path | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        self.dtype, self._where = getattr(torch, dtype), where
        try:
            with quiet_transformers(), torch.device("meta"):
                self._model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"Model folder {folder}", got=f"{error}", expected="a Hugging Face folder", do="Check the path.") from error
        self._own = self._model.state_dict(keep_vars=True)
        self._model.generation_config = GenerationConfig()  # vLLM is told what ends a response

    @property
    def vocabulary(self) -> int:
        """Entries of the model's vocabulary."""
        return int(self._model.config.get_text_config().vocab_size)

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise EngineError unless these are the weights of the architecture, by name and shape."""
        check_weights(self._own, weights)
        named = {id(self._own[name]) for name in weights}  # on the meta device tied tensors share no address, but are one object
        missing = [name for name, value in self._own.items() if name not in weights and id(value) not in named]
        if missing:
            raise EngineError("Sampler.load: weight names", got=f"{len(missing)} missing, first {missing[0]!r}", expected="every weight of the "
                              "sampler's model", do="Publish whole weights: merge LoRA and gather shards first.")  # fmt: skip

    def cast(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the CPU and in the engine's dtype; tied tensors stay one."""
        seen: dict[tuple[int, torch.Size], Tensor] = {}
        out = {}
        for name, value in weights.items():
            key = (value.data_ptr(), value.shape)
            if key not in seen or not value.numel():
                seen[key] = value.detach().to(device="cpu", dtype=self.dtype if value.is_floating_point() else None).contiguous()
            out[name] = seen[key]
        return out

    @contextmanager
    def written(self, weights: Mapping[str, Tensor], version: int) -> Iterator[Path]:
        """A folder with these weights (as `cast` gave them) that is gone afterwards.

        Raises:
            CheckpointError: no room, or no permission.
        """
        with tempfile.TemporaryDirectory(prefix=f"nearpolicy-{version}-", dir=self._where) as folder:
            target = Path(folder)
            target.chmod(0o755)  # a server may run under another user
            try:
                with quiet_transformers():
                    self._model.save_pretrained(target, state_dict=dict(weights))  # it empties the dictionary it is given
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"Published weights in {target}", got=f"{type(error).__name__}: {error}", expected="a folder that can be "
                                      "written", do="Check permissions and free space, or set sampler.weights_folder.") from error  # fmt: skip
            yield target


def probe_ids(vocabulary: int) -> list[int]:
    """The fixed prompt whose log-probs are compared: the same for the same vocabulary."""
    return [int(i) for i in generator(0, "probe", vocabulary).integers(0, vocabulary, PROBE_TOKENS)]


def _sha(*parts: Tensor) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def stale_output_layer(held: Mapping[str, str]) -> bool:
    """True where the engine packs projections (and shows them as empty) and has no output layer apart from the embedding."""
    return _EMPTY in held.values() and not any(name.endswith("lm_head.weight") for name in held)


class HeldWeights:
    """Whether an engine holds what was published to it, from the digests of its tensors at one publication after the other."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        """Tensors that could be foretold before: they must agree for ever."""
        self._held: dict[str, str] = {}
        self._given: dict[str, str] = {}

    def verify(self, held: Mapping[str, str], weights: Mapping[str, Tensor], version: int) -> tuple[int, int]:
        """How many of the engine's tensors are proven equal to what was published, and how many it shows at all.

        Args:
            held: the engine's digests, `dp0:pp0:pcp0:tp0:name` -> sha256.
            weights: what was published, in the engine's dtype.
        Raises:
            EngineError: a tensor that holds other values, or one that should have changed and did not.
        """
        shown = {name: digest for name, digest in held.items() if digest != _EMPTY}
        one_rank = len({name.rpartition(":")[0] for name in held}) == 1
        exact, given = set(), {}
        for name, digest in shown.items():
            parts = _parts(name.rpartition(":")[2], weights)
            if parts is None:
                continue
            given[name] = _sha(*parts)
            if digest in (given[name], *([_sha(*parts, _padding(parts[0]))] if parts[0].dim() == 2 and parts[0].shape[0] % _PADDING else [])):
                exact.add(name)
            elif name in self._exact or (one_rank and name.endswith(ALWAYS_SHOWN)):
                raise self._stale(name, "other values than were published", version)
            elif name in self._given and given[name] != self._given[name] and digest == self._held[name]:
                raise self._stale(name, "the values from before", version)
        if not exact and not self._held and not shown:
            raise EngineError("vLLM: weights", got="no digest of any tensor", expected="those of vLLM 0.32", do="Is it that release?")
        self._exact |= exact
        self._held, self._given = dict(shown), given
        return len(exact), len(shown)

    def _stale(self, name: str, got: str, version: int) -> EngineError:
        return EngineError(
            "vLLM: weights", got=f"{got} in {name.rpartition(':')[2]!r} after publishing version {version}", expected="the published weights",
            do="The engine acknowledged an update and kept other weights: nothing it writes can be trained on.",
        )  # fmt: skip


def _parts(name: str, weights: Mapping[str, Tensor]) -> list[Tensor] | None:
    """The published tensors that an engine's tensor is made of, in order; None where that is not known."""
    if name in weights:
        return [weights[name]]
    for fused, sources in STACKED.items():
        if f".{fused}." in name:
            found = [weights.get(name.replace(f".{fused}.", f".{source}.")) for source in sources]
            return None if any(part is None for part in found) else [part for part in found if part is not None]
    return None


def _padding(matrix: Tensor) -> Tensor:
    """The rows of zeros with which vLLM fills up a vocabulary."""
    return matrix.new_zeros(-matrix.shape[0] % _PADDING, *matrix.shape[1:])


class Probe:
    """Compares an engine's log-probs of the fixed prompt with the trainer's own, absolutely and in how they moved.

    Args:
        dtype: of the engine.
    """

    def __init__(self, *, vocabulary: int, dtype: str) -> None:
        self.ids, self.limit = probe_ids(vocabulary), PROBE_LIMITS[dtype]
        self._before: tuple[Array, Array] | None = None

    def verify(self, engine_T: Array, own_T: Array, version: int) -> float:
        """Mean |difference|, nats.

        Args:
            engine_T: log pi(ids[t] | ids[:t]) for t >= 1 by the engine.
            own_T: the same by the trainer's own model, which holds what was just published.
        Raises:
            EngineError: the engine computes with other weights than the trainer.
        """
        own_T, engine_T = np.asarray(own_T, dtype=np.float64), np.asarray(engine_T, dtype=np.float64)
        what = f"vLLM: log-probs of a fixed prompt after publishing version {version}"
        do = "The engine holds other weights than it says, or computes another model: nothing it writes can be trained on."
        if engine_T.shape != own_T.shape or not np.isfinite(engine_T).all():
            got = f"{len(engine_T)} values" if engine_T.shape != own_T.shape else "values that are not finite"
            raise EngineError(what, got=got, expected=f"{len(own_T)} finite ones", do=do)
        difference = float(np.abs(engine_T - own_T).mean())
        if difference > self.limit:
            raise EngineError(what, got=f"a mean difference of {difference:.3g} nats from the trainer's", expected=f"at most {self.limit:g}", do=do)
        if self._before is not None:
            moved = float(np.abs(own_T - self._before[0]).mean())
            if moved > self.limit / 4 and np.array_equal(engine_T, self._before[1]):
                raise EngineError(what, got=f"exactly those from before, though the trainer's moved by {moved:.3g} nats", expected="new ones", do=do)
        self._before = (own_T, engine_T)
        return difference
