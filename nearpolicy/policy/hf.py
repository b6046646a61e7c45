"""Any transformers causal language model as a `Policy`: scoring, publishing, saving.

Weights are kept in float32; matrix products run in bfloat16 by autocast where the hardware is faster at it. The output matrix is applied to
response positions only, by `objective.logprob`. Rows are packed without padding and prompts shared inside a group (`packing`) if the model allows
it; a check at construction compares both ways, and the model's own logits, on a few tokens.
"""

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nearpolicy.errors import CheckpointError, DataError, NearPolicyError, UsageError
from nearpolicy.objective.full_kl import Head
from nearpolicy.objective.logprob import shift, token_logp_entropy
from nearpolicy.policy.loading import DType, fast_bfloat16, refuse_not_finite
from nearpolicy.policy.packing import Layout, pack, packed_attention, plan_microbatches
from nearpolicy.policy.quiet import quiet_transformers
from nearpolicy.policy.routing import NOT_RECORDED, Recorder, Routers
from nearpolicy.protocols import LogProbs
from nearpolicy.rollout import Batch, Outcome, Rollout, Score, Scored, StopReason, collate

ATTENTION = "nearpolicy_packed"
"""Name under which the packed attention is registered with transformers. Without a layout it is transformers' sdpa."""

_LAYOUT = "nearpolicy_layout"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, N, D] in, [1, N, heads, D] out."""
    layout: Layout | None = kwargs.pop(_LAYOUT, None)
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "sliding_window")):
        raise NotImplementedError("attention extras")
    scale = kwargs.get("scaling")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, layout, scale=query.shape[-1] ** -0.5 if scale is None else float(scale))[None], None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class HFPolicy:
    """A transformers causal language model that can be trained.

    Args:
        model: from `load_model`, or any causal LM with a linear output layer. Its dropouts are set to 0 (a policy's log-probs must not depend on a
            draw), its attention is replaced by `ATTENTION` where prompts are shared.
        tokenizer: written by `save` beside the weights.
        dtype: of the matrix products. "auto" is bfloat16 by autocast where `fast_bfloat16`, else float32.
        token_budget: tokens of one micro-batch of `plan`, and of one forward pass of `score` without gradient.
        shared_prompts: "off" computes padded rows with the model's own attention; "auto" packs rows and shares prompts where the model allows it.
            One policy always takes the same way, so that old and new log-probs come from the same arithmetic.
        routing_replay: send tokens to the experts in `Batch.routes` (see `policy.routing`); a batch without them is then refused, and `record`
            makes them. Off: the model routes live, whatever the batch carries.

    Raises:
        UsageError: an unknown option, a model whose output layer is not linear or trained by LoRA, or routing replay without experts.
        CheckpointError: a model whose own logits differ from its output layer applied to its last hidden state (an unknown logit transform).
    """

    def __init__(
        self, model: Any, *, tokenizer: Any = None, dtype: DType = "auto", token_budget: int = 16_384,
        shared_prompts: Literal["auto", "off"] = "auto", routing_replay: bool = False,
    ) -> None:  # fmt: skip
        if dtype not in ("auto", "float32", "bfloat16"):
            raise UsageError("dtype", got=repr(dtype), expected="auto, float32 or bfloat16", do="Use auto.")
        if shared_prompts not in ("auto", "off"):
            raise UsageError("shared_prompts", got=repr(shared_prompts), expected="auto or off", do="Use auto.")
        self.model, self.tokenizer, self.token_budget = model, tokenizer, token_budget
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self.bfloat16 = dtype == "bfloat16" or (dtype == "auto" and fast_bfloat16(self.device))
        self.together: Callable[[Batch], Tensor] | None = None
        """Log-probs of a whole batch by several ranks, [B, T]; None where this process scores alone."""
        self._base: nn.Module = getattr(model, model.base_model_prefix)
        self._head = _output_layer(model)
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logit_scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        _without_dropout(model)
        # transformers checkpoints activations only in training mode, which without dropout changes nothing else.
        model.train(any(getattr(module, "gradient_checkpointing", False) for module in model.modules()))
        self.sharing_refused: str | None = "shared_prompts = off" if shared_prompts == "off" else _why_not_packed(model)
        """Why rows are not packed; None when they are."""
        own = model.config._attn_implementation
        if self.sharing_refused is None:
            _register()
            model.set_attn_implementation(ATTENTION)
        self._routers: Routers | None = None
        self._recorder: Recorder | None = None
        self._check()
        if self.sharing_refused is not None and model.config._attn_implementation != own:
            model.set_attn_implementation(own)
        if routing_replay:
            self._routers = Routers(model)
            self._routers.attach()
            self._check_replay()

    @property
    def replays_routes(self) -> bool:
        """True when tokens go to the experts that the batch names."""
        return self._routers is not None

    @property
    def shares_prompts(self) -> bool:
        """True when rows are packed and prompts shared."""
        return self.sharing_refused is None

    def score(self, batch: Batch, *, entropy_grad: bool = False) -> LogProbs:
        """Log-probs (with gradient when autograd is on) and entropies of every response token, float32 [B, T], 0 elsewhere.

        Each row is scored at its own temperature. With autograd off, the batch is computed in parts of `token_budget` tokens; with autograd on, in
        one pass: split it by `plan` and call backward for each part. The result lies on the batch's device.
        """
        if torch.is_grad_enabled() or len(plan := self.plan(batch)) == 1:
            return self._score(batch, entropy_grad)
        logp_BT = torch.zeros(batch.token_BT.shape, device=batch.token_BT.device)
        entropy_BT = torch.zeros_like(logp_BT)
        for rows in plan:
            part = self._score(batch.rows(rows), False)
            columns = slice(0, part.logp_BT.shape[1])
            logp_BT[rows, columns], entropy_BT[rows, columns] = part.logp_BT.float(), part.entropy_BT.float()
        return LogProbs(logp_BT, entropy_BT)

    def head(self, batch: Batch) -> Head:
        """States of all response tokens in row order, with gradient when autograd is on, and what makes logits of them."""
        with self._autocast():
            hidden_ND = self._states(batch)
        rows = torch.repeat_interleave(batch.temperature_B, batch.response_mask_BT.sum(1)).to(self.device)
        return Head(hidden_ND, self._head.weight, self._head.bias, rows / self._logit_scale, self._softcap)

    def plan(self, batch: Batch) -> list[list[int]]:
        """Rows of each micro-batch (see `plan_microbatches`)."""
        return plan_microbatches(batch, self.token_budget, padded=not self.shares_prompts)

    def _score(self, batch: Batch, entropy_grad: bool) -> LogProbs:
        mask_BT = batch.response_mask_BT
        target = batch.token_BT[mask_BT].to(self.device)
        rows = torch.repeat_interleave(batch.temperature_B, mask_BT.sum(1)).to(self.device)
        with self._autocast():
            hidden_ND = self._states(batch)
            logp_N, entropy_N = token_logp_entropy(
                hidden_ND, self._head.weight, target, bias=self._head.bias, temperature=rows / self._logit_scale, softcap=self._softcap,
                entropy_grad=entropy_grad,
            )  # fmt: skip
        where = batch.token_BT.device
        empty = torch.zeros(mask_BT.shape, dtype=logp_N.dtype, device=where)
        return LogProbs(empty.masked_scatter(mask_BT, logp_N.to(where)), empty.masked_scatter(mask_BT, entropy_N.to(where)))

    @torch.no_grad()
    def record(self, batch: Batch) -> tuple[LogProbs, Tensor]:
        """`score` under live routing, and the experts of every context token, int16 [B, T, L, k] on the batch's device (R2).

        Columns that no pass computes (padding, the last token of each row, rows without a response) hold `NOT_RECORDED`.

        Raises:
            UsageError: a policy without `routing_replay`.
        """
        if self._routers is None:
            raise UsageError("HFPolicy.record", got="routing_replay off", expected="a policy that replays", do="Set routing.replay.")
        where = batch.token_BT.device
        logp_BT = torch.zeros(batch.token_BT.shape, device=where)
        entropy_BT = torch.zeros_like(logp_BT)
        routes = torch.full((*logp_BT.shape, self._routers.num_layers, self._routers.top_k), NOT_RECORDED, dtype=torch.int16)
        batch = replace(batch, routes=None)
        for rows in self.plan(batch):
            part = batch.rows(rows)
            with self._routers.recording() as self._recorder:
                try:
                    scores = self._score(part, False)
                    routes_NLk = self._recorder.take().cpu()
                finally:
                    self._recorder = None
            slot_BT = pack(part, "cpu").slot_BT if self.shares_prompts else _plain_slots(part)
            columns = slice(0, slot_BT.shape[1])
            routes[rows, columns] = routes_NLk[slot_BT.clamp(min=0)].masked_fill_((slot_BT < 0)[..., None, None], NOT_RECORDED)
            logp_BT[rows, columns], entropy_BT[rows, columns] = scores.logp_BT.float(), scores.entropy_BT.float()
        return LogProbs(logp_BT, entropy_BT), routes.to(where)

    def _states(self, batch: Batch) -> Tensor:
        """The state that predicts each response token, in row-major order of the response mask, [N, D]."""
        if self.replays_routes and self._recorder is None:
            _refuse_missing_routes(batch)
        return self._packed_states(batch) if self.shares_prompts else self._plain_states(batch)

    def _run(self, routes_NLk: Tensor | None, **inputs: Any) -> Tensor:
        """Last hidden states of one call of the model, its tokens sent to the recorded experts where they are replayed."""
        if self._routers is None or self._recorder is not None:
            return self._base(**inputs, use_cache=False).last_hidden_state
        assert routes_NLk is not None, "refused before"
        with self._routers.replayed_everywhere():
            return self._base(**inputs, use_cache=False, **self._routers.keywords(routes_NLk, self.device)).last_hidden_state

    def _packed_states(self, batch: Batch) -> Tensor:
        """The state that predicts each response token, [N, D], from one packed row."""
        layout = pack(batch, self.device)
        # A mask of four dimensions is passed on untouched: transformers builds no [N, N] mask of its own, and ours is not read.
        unread = torch.zeros(1, 1, 1, 1, device=self.device)
        hidden = self._run(layout.routes_NLk, input_ids=layout.token_1N, position_ids=layout.position_1N, attention_mask=unread, **{_LAYOUT: layout})
        return hidden[0].index_select(0, layout.source_n)

    def _plain_states(self, batch: Batch) -> Tensor:
        """The same from right-padded rows: padding comes after everything that is read, so causal attention needs no mask for it."""
        B, T = batch.token_BT.shape
        width = max(T - 1, 1)
        routes_NLk = None if batch.routes is None else batch.routes[:, :width].flatten(0, 1)
        hidden = self._run(routes_NLk, input_ids=batch.token_BT[:, :width].to(self.device))
        slot_BT = torch.arange(B)[:, None] * width + torch.arange(T).clamp(max=width - 1)
        source = shift(slot_BT)[batch.response_mask_BT.cpu()].to(self.device)
        return hidden.reshape(B * width, -1).index_select(0, source)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bfloat16 else nullcontext()

    @torch.no_grad()
    def _check(self) -> None:
        """Score a few tokens by the model's own logits, by plain rows and by packed rows; refuse the model or the packing if they differ."""
        batch = _probe(self.model.config.get_text_config().vocab_size)
        want = torch.log_softmax(self.model(input_ids=batch.token_BT.to(self.device), use_cache=False).logits.float(), -1).cpu()
        mask = batch.response_mask_BT
        want_N = shift(want).gather(2, batch.token_BT[..., None])[..., 0][mask]
        tolerance = 1e-3 if self._head.weight.dtype == torch.float32 else 0.2
        refused, self.bfloat16, low = self.sharing_refused, False, self.bfloat16
        self.sharing_refused = "being checked"
        plain = self._score(batch, False).logp_BT[mask]
        if not torch.isfinite(want_N).all():
            refuse_not_finite(self.model, f"{type(self.model).__name__}: weights")
        if not torch.allclose(plain.float(), want_N, atol=tolerance, rtol=tolerance):
            gap = float((plain - want_N).abs().max())
            raise CheckpointError(
                f"{type(self.model).__name__}: logits", got=f"log-probs that differ by {gap:.2g} from the output layer's",
                expected="a linear output layer, with at most a soft-cap or a constant scale", do="This architecture is not supported.",
            )  # fmt: skip
        if refused is None:
            self.sharing_refused = None
            try:
                packed = self._score(batch, False).logp_BT[mask]
                if not torch.allclose(packed.float(), plain.float(), atol=tolerance, rtol=tolerance):
                    refused = f"packed rows differ from plain rows by {float((packed - plain).abs().max()):.2g}"
            except Exception as e:  # an architecture that cannot take packed rows fails in its own way
                refused = f"the model does not take packed rows ({type(e).__name__})"
        self.sharing_refused, self.bfloat16 = refused, low

    @torch.no_grad()
    def _check_replay(self) -> None:
        """Replaying a few tokens' own experts must give the same log-probs; refused here and not in the first update."""
        batch = _probe(self.model.config.get_text_config().vocab_size)
        live, routes = self.record(batch)
        gap = float((self.score(replace(batch, routes=routes)).logp_BT - live.logp_BT).abs().max())
        if not gap <= 1e-4:
            raise UsageError(f"{type(self.model).__name__}: routing replay", got=f"log-probs that differ by {gap:.2g} from live ones on the experts "
                             "they chose", expected="none", do="This architecture is not supported: set routing.replay=off.")  # fmt: skip

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters an optimizer updates, in a fixed order: all of them, or the adapters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """Every weight under the module's own names (adapters included), detached, tied weights once. Not copied: read it before the next update."""
        out: dict[str, Tensor] = {}
        seen: set[tuple[int, torch.Size]] = set()
        for name, value in self.model.state_dict().items():
            if (value.data_ptr(), value.shape) not in seen:
                seen.add((value.data_ptr(), value.shape))
                out[name] = value.detach()
        return out

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`, exactly.

        Raises:
            CheckpointError: missing or unknown names, or other shapes.
        """
        own = self.state_dict()
        self._refuse_names(own, state)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(state[name])

    def load_trained(self, state: Mapping[str, Tensor]) -> None:
        """Restore some parameters by name (the trained ones of a checkpoint), exactly.

        Raises:
            CheckpointError: as `load_state_dict`.
        """
        self.load_state_dict({**self.state_dict(), **state})

    def _refuse_names(self, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        wrong = sorted(own.keys() ^ state.keys()) + [k for k in own.keys() & state.keys() if own[k].shape != state[k].shape]
        if wrong:
            raise CheckpointError("Policy weights", got=f"{len(wrong)} names or shapes that differ, e.g. {wrong[0]}",
                                  expected="the weights of this model", do="Resume with the model (and LoRA options) of the run.")  # fmt: skip

    def settle(self) -> None:
        """Between forward passes without gradient and whatever changes the weights; nothing to do where they are whole."""

    def published_weights(self) -> dict[str, Tensor]:
        """Hugging Face name -> weight, adapters merged, tied weights under each of their names. Detached, not copied (merged ones are new)."""
        with torch.no_grad():
            return dict(self._published(self.model.state_dict()))

    def _published(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """These tensors of the model, by their published names: adapters merged into what they adapt."""
        adapted = {name: module for name, module in self.model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")}
        for name, value in own.items():
            if any(f".{part}." in f".{name}" for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")):
                continue
            owner, base, leaf = name.rpartition(".base_layer.")
            if base and owner in adapted:
                module = adapted[owner]
                if leaf == "weight":
                    for adapter in module.active_adapters:
                        value = value + module.get_delta_weight(adapter).to(value.dtype)
                name = f"{owner}.{leaf}"
            yield name, value.detach()

    def save(self, folder: str | Path) -> None:
        """Write a plain Hugging Face folder (adapters merged, tokenizer included) that `AutoModelForCausalLM.from_pretrained` loads as it is.

        Raises:
            CheckpointError: the folder cannot be written; nothing half-written is left in a new folder.
        """
        target = Path(folder)
        fresh = not target.exists()
        try:
            target.mkdir(parents=True, exist_ok=True)
            plain = self.model
            config = copy.deepcopy(plain.config)
            with quiet_transformers():
                config.save_pretrained(target)
                plain.save_pretrained(target, state_dict=self.published_weights())
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(target)
        except (OSError, NearPolicyError, RuntimeError) as e:
            if fresh:
                shutil.rmtree(target, ignore_errors=True)
            raise CheckpointError(f"Model folder {target}", got=f"{type(e).__name__}: {e}", expected="a folder that can be written",
                                  do="Check permissions and free space.") from e  # fmt: skip


def _output_layer(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and not hasattr(head, "lora_A"):
        return head
    raise UsageError("Output layer", got=type(head).__name__, expected="a linear layer without adapters",
                     do="Leave the output matrix out of lora.target_modules; other heads are not supported.")  # fmt: skip


def _plain_slots(batch: Batch) -> Tensor:
    """Place of each context token in the right-padded rectangle that `_plain_states` runs, int64 [B, T]; -1 elsewhere."""
    B, T = batch.token_BT.shape
    response_B1 = batch.response_mask_BT.sum(1, keepdim=True).cpu()
    inside = (torch.arange(T) < batch.prompt_length_B[:, None].cpu() + response_B1 - 1) & (response_B1 > 0)
    return torch.where(inside, torch.arange(B)[:, None] * max(T - 1, 1) + torch.arange(T), -1)


def _refuse_missing_routes(batch: Batch) -> None:
    """Replay never falls back to live routing.

    Raises:
        DataError: no experts at all, or none for a context token of some row.
    """
    do = "Record them: rollouts by a sampler with routes (r3), or by HFPolicy.record (r2)."
    if batch.routes is None:
        raise DataError("routing replay", got="a batch without routes", expected="the experts of every context token", do=do)
    missing_BT = (batch.routes[:, :, 0, 0].cpu() == NOT_RECORDED) & (_plain_slots(batch) >= 0)
    if bool(missing_BT.any()):
        b, t = (int(x) for x in missing_BT.nonzero()[0])
        raise DataError("routing replay", got=f"no experts for token {t} of row {b} (group {int(batch.group_B[b])})",
                        expected="the experts of every context token", do=do)  # fmt: skip


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _why_not_packed(model: Any) -> str | None:
    """A reason why attention of this model must see plain rows, or None."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers with {', '.join(sorted(kinds - {'full_attention'}))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "a sliding window"
    if model.config._attn_implementation not in ("sdpa", ATTENTION):
        return f"attention = {model.config._attn_implementation} was chosen"
    if not getattr(model, "_supports_attention_backend", False):
        return "an attention that cannot be replaced"
    return None


def _probe(vocabulary: int) -> Batch:
    """Two responses of one prompt and one of another, of unequal lengths."""
    token = np.arange(1, 8) % vocabulary

    def row(group: int, prompt: int, response: int) -> Scored:
        rollout = Rollout(
            prompt_id="", group=group, sample=0, prompt_P=token[group : group + prompt], response_T=token[:response][::-1],
            logp_behavior_T=np.zeros(response, dtype=np.float32), version_T=np.zeros(response, dtype=np.int64), stop=StopReason.LENGTH,
        )  # fmt: skip
        return Scored(rollout=rollout, score=Score(reward=0.0, outcome=Outcome.SCORE))

    return collate([row(0, 3, 4), row(0, 3, 2), row(1, 2, 3)], advantage_B=[0.0, 0.0, 0.0])
