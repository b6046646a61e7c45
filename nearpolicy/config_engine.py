"""The configuration's schema, who writes and when it is trained on: schedules, samplers, Ray."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nearpolicy.config_base import MOST_RESPONSES, Flag, Real, Section, Whole


class SyncSchedule(Section):
    """Sample a batch, reuse it for N sequential updates, sample again."""

    kind: Literal["sync"] = "sync"
    updates_per_rollout: Whole = Field(1, ge=1, le=MOST_RESPONSES)
    """Updates each rollout batch is split into (N). N = 1 is on-policy; the last mini-batch is N - 1 updates old."""
    record: Flag = False
    """Keep every batch that is trained on in `recording/` of the run, for `kind = "replay"`."""
    record_limit: Whole = Field(4096, ge=1, le=2**40)
    """Largest recording, MiB; what goes beyond it is not kept."""


class AsyncSchedule(Section):
    """Rollout workers write while the trainer updates (extra `ray`); each update takes `rollout.prompts` whole groups."""

    kind: Literal["async"]
    sync_every: Whole = Field(1, ge=1, le=65_536)
    """Updates between two publications of weights to the workers (K)."""
    max_age: Annotated[Whole, Field(ge=0, le=1_000_000)] | None = None
    """Most updates between the weights that wrote a group's oldest token and the update that trains on it; at least K - 1. None is K + 1: workers
    are never idle where sampling costs no more than training."""
    over_age: Literal["wait", "drop"] = "wait"
    """`wait`: no group is begun that could get too old, and the trainer waits for those that are due; `drop`: too old groups are rejected, counted
    and their prompts sampled again."""
    in_flight: Literal["keep", "finish"] = "keep"
    """Responses in flight over a publication: `keep` goes on with them under the new weights, `finish` writes them to their end under the old."""
    reuse_kv: Flag = False
    """Go on with kept responses on the cache that the old weights filled, instead of computing it anew. No weights assign exactly those log-probs."""
    workers: Whole = Field(1, ge=1, le=65_536)
    """Rollout workers."""
    worker_threads: Whole = Field(1, ge=1, le=4096)
    """CPU threads of each worker."""
    worker_gpus: Real = Field(0.0, ge=0, le=64)
    """GPUs of each worker; 0 samples on the CPU."""
    in_process: Flag = False
    """Workers write in this process, between updates and as far ahead as the bound allows, without Ray: nothing is gained in time, and a run is the
    same again bit for bit. For experiments on age; responses are then finished before a publication, whatever in_flight says."""
    wait_s: Real = Field(600.0, gt=0, le=604_800)
    """Longest time without a sign of life from workers, in every wait; then the run stops with a checkpoint."""
    record: Flag = False
    """Keep every batch that is trained on in `recording/` of the run, for `kind = "replay"`."""
    record_limit: Whole = Field(4096, ge=1, le=2**40)
    """Largest recording, MiB; what goes beyond it is not kept."""

    @property
    def updates_per_rollout(self) -> int:
        """A group is trained on once."""
        return 1

    @property
    def oldest(self) -> int:
        """The bound on the age, in updates."""
        return self.sync_every + 1 if self.max_age is None else self.max_age

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.oldest < self.sync_every - 1:
            raise ValueError(
                f"max_age = {self.oldest} must be at least sync_every - 1 = {self.sync_every - 1}: the last update before a publication trains on "
                "groups of that age"
            )
        if self.in_process and self.reuse_kv:
            raise ValueError("reuse_kv goes on with responses in flight, and in_process workers have none over a publication")
        if self.reuse_kv and self.in_flight != "keep":
            raise ValueError('reuse_kv goes on with responses that in_flight = "finish" writes to their end')
        return self


class ReplaySchedule(Section):
    """Train again on what a run with `schedule.record` was trained on."""

    kind: Literal["replay"]
    path: str
    """The run, or its folder `recording`."""

    @property
    def updates_per_rollout(self) -> int:
        """As in the recording: each batch is one update."""
        return 1


class TorchEngine(Section):
    """Responses are written by the embedded sampler, in this process (or in rollout workers), exactly as the trainer computes."""

    kind: Literal["torch"] = "torch"


class VllmEngine(Section):
    """Responses are written by vLLM, which computes otherwise than the trainer: see `ratio.denominator` and `method.correction`."""

    kind: Literal["vllm"]
    server: str | None = None
    """URL of a vLLM server in development mode (`http://host:8000`); None starts an engine with the run and ends it with it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that an engine started here computes in; `auto` is the trainer's."""
    kv_cache_gb: Annotated[Real, Field(gt=0, le=1e6)] | None = None
    """GiB that an engine started here keeps keys and values in; None leaves it to vLLM (of a GPU `gpu_memory`; on a CPU a share of all memory)."""
    gpu_memory: Real = Field(0.4, gt=0, le=1)
    """Share of the GPU's memory for an engine started here; the trainer's weights and gradients live in the rest."""
    ranks: Whole = Field(1, ge=1, le=64)
    """GPUs that an engine started here is split over (tensor parallel)."""
    eager: Flag = False
    """Start an engine here without compiling the model: it starts sooner and decodes slower."""
    timeout: Real = Field(600.0, gt=0, le=86_400)
    """Seconds without a completed response, or an answer, after which the engine counts as hung; longer than the longest response takes."""
    retries: Whole = Field(3, ge=0, le=1000)
    """Times a failed request to a server is sent again, after 1, 2, 4, ... at most 30 s; then the run stops with a checkpoint."""
    weights_folder: str | None = None
    """Folder in which published weights are written for the engine, and seen by a server under the same path; None is the system's for temporary
    files."""
    probe: Flag = True
    """After every publication compare the engine's log-probs of a fixed prompt with the trainer's own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = sorted({"dtype", "eager", "kv_cache_gb", "gpu_memory", "ranks"} & self.model_fields_set)
        if self.server is not None and given:
            raise ValueError(f"{', '.join(given)}: keys of an engine started here; start the server with them")
        return self


class Ray(Section):
    """Where rollout workers run (schedule.kind = async). Without keys: on this machine."""

    address: str | None = None
    """`host:port` of a cluster's head node, or `auto`; None starts Ray here and ends it with the run."""
    object_store_mb: Annotated[Whole, Field(ge=128, le=2**30)] | None = None
    """Shared memory of a Ray that is started here, MiB; None has room for four versions of the weights."""
    restarts: Whole = Field(3, ge=0, le=1000)
    """Times in a row that a worker may die without having finished a group, before the run stops with a checkpoint."""
