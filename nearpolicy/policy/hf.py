"""Any transformers causal language model as a `Policy`: loading, LoRA, scoring, publishing, saving.

Weights are kept in float32; matrix products run in bfloat16 by autocast where the hardware is faster at it. The output matrix is applied to
response positions only, by `objective.logprob`. Rows are packed without padding and prompts shared inside a group (`packing`) if the model allows
it; a check at construction compares both ways, and the model's own logits, on a few tokens.
"""

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from nearpolicy.errors import CheckpointError, NearPolicyError, UsageError
from nearpolicy.objective.full_kl import Head
from nearpolicy.objective.logprob import shift, token_logp_entropy
from nearpolicy.policy.packing import Layout, pack, packed_attention, plan_microbatches
from nearpolicy.policy.quiet import quiet_transformers
from nearpolicy.protocols import LogProbs
from nearpolicy.rollout import Batch, Outcome, Rollout, Score, Scored, StopReason, collate

ATTENTION = "nearpolicy_packed"
"""Name under which the packed attention is registered with transformers. Without a layout it is transformers' sdpa."""

_LAYOUT = "nearpolicy_layout"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_MAX_SHOWN = 300
_WEIGHT_FILES = ("*.safetensors",)
DType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters on the linear layers, W + (alpha / rank) B A (Hu et al. 2021, arXiv 2106.09685, section 4.1). No dropout: log-probs
    of one policy must not depend on a draw."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] | str = "all-linear"
    """Module name endings, or "all-linear" for every linear layer except the output matrix."""


def load_model(
    path: str | Path,
    *,
    dtype: DType = "auto",
    device: str = "auto",
    lora: LoraOptions | None = None,
    gradient_checkpointing: bool = False,
    attention: str | None = None,
) -> tuple[Any, Any]:
    """A model and its tokenizer from a Hugging Face folder (or a repository id that lies in the local cache); nothing is downloaded.

    Args:
        path: folder with config.json, safetensors weights and tokenizer files.
        dtype: of the stored weights. "auto" and "float32" give float32 master weights; "bfloat16" halves memory for models that are not trained.
        device: "auto" takes CUDA where there is one.
        lora: train adapters and freeze everything else.
        gradient_checkpointing: compute activations again in backward (per layer, non-reentrant).
        attention: a transformers attention implementation; None leaves the choice to `HFPolicy`. Any choice but "sdpa" turns packing off.

    Returns:
        (model, tokenizer), the model in evaluation mode.

    Raises:
        CheckpointError: no such folder, no config, no tokenizer, no weights, weights that are corrupt, truncated, incomplete, not finite or of the
            wrong shape, an architecture that transformers does not know as a causal language model.
        UsageError: an unknown dtype, or LoRA options that fit no layer.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UsageError("model.dtype", got=repr(dtype), expected="auto, float32 or bfloat16", do="Use auto for master weights in float32.")
    folder = _folder(path)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    with quiet_transformers():
        tokenizer, model, info = _read(folder, torch.bfloat16 if dtype == "bfloat16" else torch.float32, attention)
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            names = sorted(k if isinstance(k, str) else str(k[0]) for k in info[kind])  # mismatched: (name, shape, shape)
            raise CheckpointError(
                f"Model folder {folder}: weights", got=f"{len(names)} {kind.replace('_', ' ')}, e.g. {names[0]}",
                expected="every weight of the architecture in config.json", do="Copy the folder again; it is incomplete or of another config.",
            )  # fmt: skip
    model = model.to(where)
    _refuse_not_finite(model, f"Model folder {folder}: weights")
    if gradient_checkpointing:
        _checkpoint_activations(model)
    if lora is not None:
        _add_lora(model, lora)
    return model.eval(), tokenizer


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a Hugging Face folder, without its weights.

    Raises:
        CheckpointError: no such folder, no config or no tokenizer that can be read.
    """
    folder = _folder(path)
    with quiet_transformers():
        return _read_tokenizer(folder)


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # transformers raises many kinds here; the tokenizer would read it too, and be blamed
        raise _unreadable(folder, "config.json", e) from e
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as e:
        raise _unreadable(folder, "tokenizer", e) from e


def _read(folder: Path, dtype: torch.dtype, attention: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """Tokenizer, model, and what transformers says of the loading."""
    from transformers import AutoModelForCausalLM

    tokenizer = _read_tokenizer(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in `info`, with their names, and refused by the caller
            **({} if attention is None else {"attn_implementation": attention}),
        )
    except Exception as e:
        raise _unreadable(folder, "model", e) from e
    return tokenizer, model, info


def _checkpoint_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # its name before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _refuse_not_finite(model: nn.Module, what: str) -> None:
    """A sum is not finite if a term is not: one read of each weight, without a copy.

    Raises:
        CheckpointError: naming the first such weight.
    """
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not torch.isfinite(value.sum(dtype=torch.float32)) and (bad := int((~torch.isfinite(value)).sum())):
                raise CheckpointError(what, got=f"{bad} of {value.numel()} values of {name} NaN or infinite", expected="finite weights",
                                      do="Copy the folder again, or take an earlier checkpoint.")  # fmt: skip


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        cached = _cached_repository(str(path))
        if cached is None:
            raise CheckpointError(
                f"Model folder {path}", got="no such folder", expected="a Hugging Face model folder",
                do="Check model.path; a model on the hub must be downloaded first (hf download NAME).",
            )  # fmt: skip
        folder = cached
    for what, patterns in (("config.json", ("config.json",)), ("tokenizer", _TOKENIZER_FILES), ("safetensors weights", _WEIGHT_FILES)):
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise CheckpointError(
                f"Model folder {folder}", got=f"no {what}", expected="config.json, *.safetensors and tokenizer files",
                do=f"Copy the missing files ({', '.join(patterns[:3])}) into it.",
            )  # fmt: skip
    return folder


def _cached_repository(name: str) -> Path | None:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not in the cache, or not a repository id: the caller says so
        return None


def _unreadable(folder: Path, what: str, error: Exception) -> CheckpointError:
    message = " ".join(f"{type(error).__name__}: {str(error) or 'no message'}".split())[:_MAX_SHOWN]
    return CheckpointError(
        f"Model folder {folder}: {what}", got=message, expected=f"a readable {what}",
        do="Copy the folder again, and check that this transformers version knows the architecture.",
    )  # fmt: skip


def _add_lora(model: nn.Module, options: LoraOptions) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise UsageError("model.lora", got="peft is not installed", expected="the extra", do="pip install 'nearpolicy[lora]'.") from e
    targets = options.target_modules
    try:
        inject_adapter_in_model(
            LoraConfig(r=options.rank, lora_alpha=options.alpha, lora_dropout=0.0, bias="none",
                       target_modules=targets if isinstance(targets, str) else list(targets)), model,
        )  # fmt: skip
    except ValueError as e:
        raise UsageError("model.lora", got=str(options), expected="a rank above 0 and names of linear layers", do=str(e).splitlines()[0]) from e


def fast_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 beat float32 on this device: CUDA with native bf16, or a CPU with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


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

    Raises:
        UsageError: an unknown option, or a model whose output layer is not linear or trained by LoRA.
        CheckpointError: a model whose own logits differ from its output layer applied to its last hidden state (an unknown logit transform).
    """

    def __init__(
        self, model: Any, *, tokenizer: Any = None, dtype: DType = "auto", token_budget: int = 16_384, shared_prompts: Literal["auto", "off"] = "auto"
    ) -> None:
        if dtype not in ("auto", "float32", "bfloat16"):
            raise UsageError("dtype", got=repr(dtype), expected="auto, float32 or bfloat16", do="Use auto.")
        if shared_prompts not in ("auto", "off"):
            raise UsageError("shared_prompts", got=repr(shared_prompts), expected="auto or off", do="Use auto.")
        self.model, self.tokenizer, self.token_budget = model, tokenizer, token_budget
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self.bfloat16 = dtype == "bfloat16" or (dtype == "auto" and fast_bfloat16(self.device))
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
        self._check()
        if self.sharing_refused is not None and model.config._attn_implementation != own:
            model.set_attn_implementation(own)

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
            hidden_ND = self._packed_states(batch) if self.shares_prompts else self._plain_states(batch)
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
            hidden_ND = self._packed_states(batch) if self.shares_prompts else self._plain_states(batch)
            logp_N, entropy_N = token_logp_entropy(
                hidden_ND, self._head.weight, target, bias=self._head.bias, temperature=rows / self._logit_scale, softcap=self._softcap,
                entropy_grad=entropy_grad,
            )  # fmt: skip
        where = batch.token_BT.device
        empty = torch.zeros(mask_BT.shape, dtype=logp_N.dtype, device=where)
        return LogProbs(empty.masked_scatter(mask_BT, logp_N.to(where)), empty.masked_scatter(mask_BT, entropy_N.to(where)))

    def _packed_states(self, batch: Batch) -> Tensor:
        """The state that predicts each response token, [N, D], from one packed row."""
        layout = pack(batch, self.device)
        # A mask of four dimensions is passed on untouched: transformers builds no [N, N] mask of its own, and ours is not read.
        unread = torch.zeros(1, 1, 1, 1, device=self.device)
        out = self._base(input_ids=layout.token_1N, position_ids=layout.position_1N, attention_mask=unread, use_cache=False, **{_LAYOUT: layout})
        return out.last_hidden_state[0].index_select(0, layout.source_n)

    def _plain_states(self, batch: Batch) -> Tensor:
        """The same from right-padded rows: padding comes after everything that is read, so causal attention needs no mask for it."""
        B, T = batch.token_BT.shape
        width = max(T - 1, 1)
        hidden = self._base(input_ids=batch.token_BT[:, :width].to(self.device), use_cache=False).last_hidden_state
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
            _refuse_not_finite(self.model, f"{type(self.model).__name__}: weights")
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
        wrong = sorted(own.keys() ^ state.keys()) + [k for k in own.keys() & state.keys() if own[k].shape != state[k].shape]
        if wrong:
            raise CheckpointError("Policy weights", got=f"{len(wrong)} names or shapes that differ, e.g. {wrong[0]}",
                                  expected="the weights of this model", do="Resume with the model (and LoRA options) of the run.")  # fmt: skip
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(state[name])

    def published_weights(self) -> dict[str, Tensor]:
        """Hugging Face name -> weight, adapters merged, tied weights under each of their names. Detached, not copied (merged ones are new)."""
        with torch.no_grad():
            return dict(self._merged())

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        adapted = {name: module for name, module in self.model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")}
        for name, value in self.model.state_dict().items():
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


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
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
