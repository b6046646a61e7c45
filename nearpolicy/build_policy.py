"""The composer's part for what is trained: the model, its own sampler, the optimizer and the step. A process alone and each rank build it alike."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearpolicy.build_teacher import Folder, build_teacher, full_signal
from nearpolicy.check import model_size
from nearpolicy.check_teacher import build_mixture, reads_reference
from nearpolicy.config import AsyncSchedule, Config
from nearpolicy.methods import Method
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import LoraOptions, load_model
from nearpolicy.policy.teacher import load_scorer
from nearpolicy.protocols import Teacher
from nearpolicy.rollout import Prompt
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.schedule.workers import usable_cpus
from nearpolicy.trainer.checkpoint import load_optimizer_tensors, optimizer_tensors
from nearpolicy.trainer.step import StepOptions, Stepper, learning_rate

SMALL_MODEL = 2_000_000
"""Models with fewer parameters gain from a second CPU thread (1.4x on the tiny default) and lose with more."""


def keep_freed_memory() -> bool:
    """Tell the C library (glibc) to keep what is freed: a small model's buffers of some MB otherwise go back to the system and return page by page,
    a quarter of the time of reading relayed prefixes and 3 % of an update of the tiny default (LOG.md). False where there is no such library."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # <malloc.h>
    return all([mallopt(mmap_threshold, 32 << 20), mallopt(trim_threshold, 512 << 20), mallopt(top_pad, 64 << 20)])


def set_threads(config: Config, num_parameters: int) -> None:
    """`threads`; else at most two for a small model, and none that workers on this machine need."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
        return
    s = config.schedule
    if isinstance(s, AsyncSchedule) and not s.in_process and config.ray.address is None:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cpus() - s.workers * s.worker_threads)))
    if num_parameters < SMALL_MODEL:
        torch.set_num_threads(min(2, torch.get_num_threads()))


def load_policy(config: Config, folder: Path, mesh: Any = None) -> HFPolicy:
    """The model that is trained, with its tokenizer; with `mesh`, this rank's share of it.

    Raises:
        CheckpointError, UsageError: as `load_model` and `HFPolicy`.
    """
    m = config.model
    parameters = model_size(folder).parameters if folder.is_dir() and any(folder.glob("*.safetensors")) else SMALL_MODEL
    set_threads(config, parameters)
    if parameters < SMALL_MODEL:
        keep_freed_memory()
    torch.manual_seed(config.seed)  # adapters are drawn from it
    lora = LoraOptions(rank=m.lora.rank, alpha=m.lora.alpha, target_modules=m.lora.targets) if m.lora else None
    # Shares go to their device one unit after the other: the whole model need not fit there.
    model, tokenizer = load_model(folder, device=config.device if mesh is None else "cpu", lora=lora, gradient_checkpointing=m.gradient_checkpointing)
    options: dict[str, Any] = {
        "tokenizer": tokenizer, "dtype": m.dtype, "token_budget": config.train.token_budget, "shared_prompts": m.shared_prompts,
        "routing_replay": config.routing.replay != "off",
    }  # fmt: skip
    if mesh is None:
        return HFPolicy(model, **options)
    from nearpolicy.policy.sharded import ShardedPolicy

    return ShardedPolicy(model, mesh=mesh, **options)


def own_sampler(config: Config, folder: Path, policy: HFPolicy, *, shared: bool) -> TorchSampler:
    """On the trainer's own module where both compute in float32, else on a copy that publications fill.

    Args:
        shared: False never takes the trainer's module (of which a rank holds a share).
    """
    given: dict[str, Any] = {"max_rows": config.rollout.max_rows, "router_noise": config.routing.sampler_noise}
    if config.model.lora is not None or not shared:
        plain, _ = load_model(folder, dtype="bfloat16" if policy.bfloat16 else "float32", device=str(policy.device))
        return TorchSampler(plain, policy.tokenizer, **given)
    return TorchSampler(policy.model, policy.tokenizer, dtype=torch.bfloat16 if policy.bfloat16 else None, **given)


@dataclass(slots=True)
class Learner:
    """Optimizer and step, and the fixed models that the step or the schedule asks."""

    config: Config
    policy: HFPolicy
    optimizer: torch.optim.Optimizer
    names: dict[int, str]
    """id of a parameter -> its name."""
    stepper: Stepper
    teacher: Teacher | None
    reference: HFPolicy | None

    def trained(self) -> dict[str, Tensor]:
        """Adapters, which the model folder holds merged; {} without."""
        return {n: p.detach() for n, p in self.policy.model.named_parameters() if p.requires_grad} if self.config.model.lora is not None else {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Optimizer state and master tensors, not copied."""
        return optimizer_tensors(self.optimizer, self.names), self.trained()

    def restore(self, optimizer: dict[str, Tensor], master: dict[str, Tensor]) -> None:
        """Whole optimizer state and master tensors of a checkpoint.

        Raises:
            CheckpointError: of another model.
        """
        if self.config.model.lora is not None:
            self.policy.load_trained(master)
        load_optimizer_tensors(self.optimizer, self.names, optimizer)


def build_learner(
    config: Config, policy: HFPolicy, chosen: Method, *, prompts: Sequence[Prompt], folder: Folder, say: Callable[[str], None],
    kind: type[Stepper] = Stepper, with_teacher: bool = True,
) -> Learner:  # fmt: skip
    """Optimizer, step, teacher and reference of a run.

    Args:
        prompts: every training prompt, where teachers have routes.
        folder: a model's name or path -> its folder.
        kind: class of the step.
        with_teacher: False on a rank that never asks it.
    """
    t = config.train
    fused = policy.device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=fused)
    mixture = build_mixture(config)
    teacher = build_teacher(config, policy, prompts, folder=folder, say=say) if with_teacher else None
    reference = None
    if reads_reference(config, chosen, mixture):  # reference.path, or a frozen copy of the initial model, read again on a resume
        reference = load_scorer(folder(config.reference.path or config.model.path), device=str(policy.device), dtype=None, student=policy,
                                token_budget=t.token_budget, name="reference")  # fmt: skip
    stepper = kind(
        policy, chosen, optimizer,
        StepOptions(grad_clip=t.grad_clip, kl_coefficient=t.kl_coefficient, kl_estimator=t.kl_estimator, entropy_coefficient=t.entropy_coefficient,
                    steps=t.steps),
        lambda step: learning_rate(step, peak=t.lr, steps=t.steps, warmup=t.warmup, decay=t.decay, floor=t.min_lr),
        mixture=mixture, full=full_signal(config, teacher) if with_teacher else None,
    )  # fmt: skip
    names = {id(p): n for n, p in policy.model.named_parameters()}
    return Learner(config, policy, optimizer, names, stepper, teacher, reference)
