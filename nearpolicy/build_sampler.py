"""The composer's part for samplers: from `sampler.*` to who decodes, in this process or in a worker's, and how weights reach it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nearpolicy.build_policy import own_sampler
from nearpolicy.config import AsyncSchedule, Config, VllmEngine
from nearpolicy.errors import UsageError
from nearpolicy.jsonhttp import JsonServer
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import load_tokenizer
from nearpolicy.protocols import Sampler
from nearpolicy.rollout import Array, Outcome, Rollout, Score, Scored, StopReason, collate
from nearpolicy.sampler.factory import PACKAGE, TorchFactory, portable
from nearpolicy.sampler.publish import SamplerFactory
from nearpolicy.sampler.vllm import LocalEngine, LocalOptions
from nearpolicy.sampler.vllm_calls import Engine
from nearpolicy.sampler.vllm_sampler import VllmSampler
from nearpolicy.sampler.vllm_server import KEY, ServerEngine

UNPUBLISHED = -1
"""Version of an engine that was given nothing yet: the first publication replaces what it was started with, and proves that it can."""


def build_sampler(config: Config, folder: Path, policy: HFPolicy, *, say: Callable[[str], None] = print) -> Sampler:
    """The sampler of this process, which holds the policy's weights as version 0. Of an asynchronous run it only evaluates, and is the embedded one.

    Args:
        folder: of the model's architecture and tokenizer.
        say: hears of requests to a server that are sent again.
    Raises:
        UsageError: vLLM is not installed, or another release.
        EngineError: an engine that does not start or answer, serves another model, or does not take the weights.
    """
    if not isinstance(config.sampler, VllmEngine) or isinstance(config.schedule, AsyncSchedule):
        return own_sampler(config, folder, policy, shared=True)
    sampler = VllmFactory.of(config, folder, policy)(say=say)
    try:
        publish(config, sampler, policy, 0)
    except BaseException:
        sampler.close()
        raise
    return sampler


def worker_factory(config: Config, folder: Path, policy: HFPolicy) -> SamplerFactory:
    """Makes the sampler of a rollout worker (schedule.kind = async). Picklable."""
    s = config.schedule
    assert isinstance(s, AsyncSchedule)
    if isinstance(config.sampler, VllmEngine):
        return VllmFactory.of(config, folder, policy, threads=s.worker_threads)
    return TorchFactory.of(folder, bfloat16=policy.bfloat16, device="cuda" if s.worker_gpus else "cpu", threads=s.worker_threads,
                           max_rows=config.rollout.max_rows, router_noise=config.routing.sampler_noise)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFactory:
    """A vLLM sampler on the model of a folder."""

    folder: str
    """Path of a Hugging Face folder on the machine where the sampler is made; one inside this package is found there too."""
    engine: VllmEngine
    dtype: str
    longest: int
    max_rows: int
    threads: int | None = None
    """CPU threads of an engine started here."""

    @classmethod
    def of(cls, config: Config, folder: Path, policy: HFPolicy, *, threads: int | None = None) -> "VllmFactory":
        """As `sampler.*` says, for prompts and responses of this run.

        Raises:
            UsageError: prompt and response longer than the model's positions leave no room.
        """
        assert isinstance(config.sampler, VllmEngine)
        dtype = config.sampler.dtype if config.sampler.dtype != "auto" else "bfloat16" if policy.bfloat16 else "float32"
        longest = config.task.max_prompt_tokens + config.rollout.max_tokens
        most = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and config.rollout.max_tokens >= most:
            raise UsageError("rollout.max_tokens", got=config.rollout.max_tokens, expected=f"less than the model's {most} positions", do="Lower it.")
        return cls(
            folder=portable(folder), engine=config.sampler, dtype=dtype,
            longest=longest if most is None else min(longest, most), max_rows=config.rollout.max_rows,
            threads=config.threads if threads is None else threads,
        )  # fmt: skip

    def __call__(self, *, say: Callable[[str], None] = print) -> VllmSampler:
        """The sampler; it holds no version until weights are loaded."""
        folder, e = PACKAGE / self.folder, self.engine
        tokenizer = load_tokenizer(folder)
        engine: Engine
        if e.server is not None:
            http = JsonServer(name="sampler.server", url=e.server, timeout=e.timeout, retries=e.retries, key=KEY, say=say)
            server = ServerEngine(http, max_rows=self.max_rows)
            server.check_tokenizer(tokenizer)
            engine = server
        else:
            options = LocalOptions(dtype=self.dtype, max_rows=self.max_rows, longest=self.longest, kv_cache_gb=e.kv_cache_gb,
                                   gpu_memory=e.gpu_memory, ranks=e.ranks, timeout=e.timeout, eager=e.eager, threads=self.threads)  # fmt: skip
            engine = LocalEngine(folder, options)
        try:
            where = None if e.weights_folder is None else Path(e.weights_folder)
            return VllmSampler(engine, tokenizer, folder=folder, version=UNPUBLISHED, weights_folder=where)
        except BaseException:
            engine.close()
            raise


def publish(config: Config, sampler: Sampler, policy: HFPolicy, version: int) -> None:
    """The sampler holds the policy's weights, called by this version, when it returns; nothing happens where it does already.

    Raises:
        EngineError: an engine that does not hold what it was given.
    """
    if sampler.version == version:
        return
    sampler.load(policy.published_weights(), version)
    if isinstance(sampler, VllmSampler) and isinstance(config.sampler, VllmEngine) and config.sampler.probe:
        sampler.compare(lambda ids: policy_logp(policy, ids))


def policy_logp(policy: HFPolicy, ids: list[int]) -> Array:
    """log pi(ids[t] | ids[:t]) for t >= 1 by the trainer's own model at temperature 1, float32 [len(ids) - 1]."""
    T = len(ids) - 1
    rollout = Rollout(
        prompt_id="probe", group=0, sample=0, prompt_P=np.array(ids[:1]), response_T=np.array(ids[1:]), logp_behavior_T=np.zeros(T, np.float32),
        version_T=np.zeros(T, np.int64), stop=StopReason.LENGTH,
    )  # fmt: skip
    batch = collate([Scored(rollout=rollout, score=Score(reward=0.0, outcome=Outcome.SCORE))], advantage_B=[0.0])
    with torch.no_grad():
        logp_BT = policy.score(batch).logp_BT
    return np.asarray(logp_BT[0, 1:].float().cpu())


def close(sampler: Sampler) -> None:
    """End what the sampler started; nothing for those that started nothing."""
    end = getattr(sampler, "close", None)
    if end is not None:
        end()
