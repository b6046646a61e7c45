"""Routing replay for mixture-of-experts models: which experts each token went to, recorded in one pass and used again in another.

A router scores all experts and keeps the k best. Two passes over the same tokens that differ by rounding may keep different ones, and the
log-probs then differ far more than by rounding. Replay keeps the recorded experts and takes their gates from the router's own logits at hand:

    g_e = exp(z_e) / sum over recorded e' of exp(z_e')        where the model normalises over its top k (Mixtral; Qwen3-MoE with norm_topk_prob)
    g_e = exp(z_e) / sum over all e' of exp(z_e')             where it does not

so that the gradient reaches the router, and the replay of a pass's own experts is that pass bit for bit (float32 and below). Whose experts are
recorded is the caller's choice: the sampler's (R3, arXiv 2510.11370) or those of the trainer's own pass before the first update of a rollout
batch (R2: VESPO, arXiv 2602.10693, section 4.4; GSPO's routing replay).

Everything hangs on hooks: a model without them is untouched. Routers are the modules that return (logits [N, E], gates [N, k], experts [N, k])
for N tokens. To replay, the model is called with the keyword `ROUTES`, which it hands down to its layers and they to their attention: it is
there again when gradient checkpointing runs a layer a second time in backward.

Letters: N tokens, L layers with experts, E experts, k experts a token.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from nearpolicy.errors import DataError, EngineError, UsageError
from nearpolicy.randomness import generator

ROUTES = "nearpolicy_routes"
"""Keyword under which the experts to use, int [N, L, k], travel through the model to its layers."""
NOT_RECORDED = -1
"""Fills columns that no pass computed: padding, and the last token of a response."""
RECORD_BYTES = 2
"""Bytes for each recorded expert (int16: up to 32,767 experts); a context token takes L * k of them."""

Gate = Literal["softmax", "normalized_softmax", "normalized_sigmoid"]
"""How gates come from logits: over all experts, over the kept ones, or sigmoids divided by their sum over the kept ones."""

_NAME = re.compile("router|gate", re.IGNORECASE)


def gate_weights(logits_NE: Tensor, expert_Nk: Tensor, *, form: Gate) -> Tensor:
    """Gates of the given experts from the router's logits, [N, k], in float32 (float64 for float64 logits).

    The order of operations is that of the models, so that own top-k experts give the model's own bits: softmax over all, gather, divide.
    """
    dtype = torch.promote_types(logits_NE.dtype, torch.float32)
    if form == "normalized_sigmoid":
        gate_Nk = logits_NE.to(dtype).sigmoid().gather(-1, expert_Nk)
    else:
        gate_Nk = torch.softmax(logits_NE, dim=-1, dtype=dtype).gather(-1, expert_Nk)
    return gate_Nk if form == "softmax" else gate_Nk / gate_Nk.sum(-1, keepdim=True)


@dataclass(slots=True, eq=False)
class _Router:
    """One router, the decoder layer that it lies in, and what is handed over for its next call."""

    name: str
    module: nn.Module
    layer: nn.Module
    form: Gate = "softmax"
    num_experts: int = 0
    top_k: int = 0
    expert_Nk: Tensor | None = None


class Recorder:
    """The experts that the last forward pass chose."""

    def __init__(self, num_layers: int) -> None:
        self._expert_Nk: list[Tensor | None] = [None] * num_layers

    def put(self, layer: int, expert_Nk: Tensor) -> None:
        """Called by the hook of each router."""
        self._expert_Nk[layer] = expert_Nk.detach().to(torch.int16)

    def take(self) -> Tensor:
        """int16 [N, L, k] of the last forward pass, its N tokens in the order in which the model saw them.

        Raises:
            EngineError: a layer with experts was not run.
        """
        found = [e for e in self._expert_Nk if e is not None]
        if len(found) < len(self._expert_Nk):
            raise EngineError("routing: recording", got=f"{len(found)} of {len(self._expert_Nk)} routers run", expected="all of them in each pass",
                              do="Record whole forward passes of the model.")  # fmt: skip
        self._expert_Nk = [None] * len(self._expert_Nk)
        return torch.stack(found, 1)


class Routers:
    """The routers of a causal language model, in layer order. A few tokens are run to see what they return.

    Raises:
        UsageError: a model without experts, or with routers whose outputs are not (logits, gates, experts) in one of the forms of `Gate`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._routers = _find(model)
        self.replayed = 0
        """Calls of routers that were given experts; grows by `num_layers` with each pass."""
        self._attached = False

    @property
    def num_layers(self) -> int:
        """L, layers with experts."""
        return len(self._routers)

    @property
    def num_experts(self) -> int:
        """E; the smallest of the layers."""
        return min(r.num_experts for r in self._routers)

    @property
    def top_k(self) -> int:
        """k, experts of a token."""
        return self._routers[0].top_k

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Passes inside this context leave their experts with the recorder."""
        recorder = Recorder(self.num_layers)
        with ExitStack() as stack:
            for layer, router in enumerate(self._routers):
                stack.callback(router.module.register_forward_hook(partial(_record, recorder, layer)).remove)
            yield recorder

    def attach(self) -> None:
        """From now on the model takes the keyword `ROUTES`; without it, it routes as before. Once for each model."""
        if self._attached:
            return
        self._attached = True
        for layer in dict.fromkeys(r.layer for r in self._routers):
            inside = [(i, r) for i, r in enumerate(self._routers) if r.layer is layer]
            layer.register_forward_pre_hook(partial(_forget, inside))
            # Gradient checkpointing runs `forward` of a layer again, without the hooks of the layer itself: its attention, which comes before
            # the router and is given the keywords, hands them over.
            for child in layer.children():
                child.register_forward_pre_hook(partial(_hand_over, inside), with_kwargs=True)
        for router in self._routers:
            router.module.register_forward_hook(partial(self._replay, router))

    def keywords(self, routes_NLk: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Keywords of the model's next call. Columns that were not recorded (padding) get some experts: what they compute is not read.

        Args:
            routes_NLk: integers, `NOT_RECORDED` where nothing was; one row for each token of the call, in its order.
        Raises:
            DataError: another number of layers or experts a token than the model's, or ids beyond its experts.
        """
        L, k = self.num_layers, self.top_k
        if tuple(routes_NLk.shape[1:]) != (L, k):
            raise DataError("routing records", got=f"{tuple(routes_NLk.shape[1:])} layers and experts a token", expected=f"{(L, k)}, the model's",
                            do="Replay what this architecture recorded.")  # fmt: skip
        if routes_NLk.numel():
            low, high = (int(x) for x in torch.aminmax(routes_NLk))
            if high >= self.num_experts or low < NOT_RECORDED:
                raise DataError("routing records", got=f"expert {high if high >= self.num_experts else low}",
                                expected=f"0 to {self.num_experts - 1}", do="Replay what this architecture recorded.")  # fmt: skip
            if low == NOT_RECORDED:
                routes_NLk = torch.where(routes_NLk < 0, torch.arange(k, dtype=routes_NLk.dtype, device=routes_NLk.device), routes_NLk)
        return {ROUTES: routes_NLk.to(device)}

    @contextmanager
    def replayed_everywhere(self) -> Iterator[None]:
        """One pass of the model with `ROUTES` inside.

        Raises:
            EngineError: the keyword did not reach every router, which then routed live.
        """
        before = self.replayed
        yield
        if (reached := self.replayed - before) != self.num_layers:
            raise EngineError(f"{type(self.model).__name__}: routing replay", got=f"{reached} of {self.num_layers} routers replayed",
                              expected="all of them", do="This architecture hands no keywords down to its layers: it cannot replay.")  # fmt: skip

    def _replay(self, router: _Router, module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        given, router.expert_Nk = router.expert_Nk, None
        if given is None:
            return None
        logits_NE, gate_Nk, expert_Nk = output
        if len(given) != len(logits_NE):
            raise DataError("routing records", got=f"{len(given)} tokens", expected=f"{len(logits_NE)} of the pass", do="Record all.")
        self.replayed += 1
        given = given.to(expert_Nk.dtype)
        return logits_NE, gate_weights(logits_NE, given, form=router.form).to(gate_Nk.dtype), given

    @contextmanager
    def noisy(self, scale: float, *key: object) -> Iterator[None]:
        """Router weights carry an error inside this context: W + scale * rms(W) * n with standard normal n drawn by `key` and layer.

        The error is the same for the same key, and as without it (bit for bit) outside. 0 changes nothing.
        """
        held: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for layer, router in enumerate(self._routers if scale else ()):
                weight = router.module.weight
                assert isinstance(weight, nn.Parameter), "looked for at construction"
                own = weight.data
                noise = generator(0, "router_noise", *key, layer).standard_normal(tuple(own.shape), dtype=np.float32)
                error = torch.from_numpy(noise).to(own.device) * (scale * own.float().square().mean().sqrt())
                held.append((weight, own))
                weight.data = (own.float() + error).to(own.dtype)
            yield
        finally:
            for weight, own in held:
                weight.data = own


def _record(recorder: Recorder, layer: int, module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    recorder.put(layer, output[2])


def _forget(inside: list[tuple[int, _Router]], layer: nn.Module, args: Any) -> None:
    for _, router in inside:
        router.expert_Nk = None


def _hand_over(inside: list[tuple[int, _Router]], child: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    routes_NLk: Tensor | None = kwargs.get(ROUTES)
    if routes_NLk is None:
        return None
    for index, router in inside:
        router.expert_Nk = routes_NLk[:, index]
    return args, {k: v for k, v in kwargs.items() if k != ROUTES}


def _find(model: Any) -> list[_Router]:
    """Modules named as routers, with what they return for a few tokens."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    named = {name: m for name, m in modules.items() if _NAME.search(type(m).__name__) and hasattr(m, "weight")}
    if not named:
        raise UsageError(f"{type(model).__name__}: routing replay", got="a model without experts", expected="a mixture of experts with routers",
                         do="Set routing.replay=off.")  # fmt: skip
    seen: dict[str, Any] = {}
    hooks = [m.register_forward_hook(partial(_see, seen, name)) for name, m in named.items()]
    try:
        device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
        with torch.no_grad():
            model(input_ids=((torch.arange(1, 6, device=device) * 7) % vocabulary)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    routers = []
    for name, module in named.items():
        router = _Router(name, module, _layer_of(modules, name))
        form = _form(seen.get(name))
        if form is None:
            forms = ", ".join(get_args(Gate))
            raise UsageError(f"{type(model).__name__}: routing replay", got=f"router {type(module).__name__} ({name})",
                             expected=f"one that returns (logits, gates, experts) with gates by {forms}",
                             do="This architecture is not supported: set routing.replay=off.")  # fmt: skip
        router.form, router.num_experts, router.top_k = form, seen[name][0].shape[-1], seen[name][2].shape[-1]
        routers.append(router)
    return routers


def _see(seen: dict[str, Any], name: str, module: nn.Module, args: Any, output: Any) -> None:
    seen[name] = output


def _form(output: Any) -> Gate | None:
    """The form that reproduces a router's gates: exactly if one does, else within rounding; None for any other output."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) and x.dim() == 2 for x in output)):
        return None
    logits, gate, expert = output
    if expert.is_floating_point() or gate.shape != expert.shape or len(logits) != len(expert):
        return None
    made: dict[Gate, Tensor] = {form: gate_weights(logits, expert, form=form).to(gate.dtype) for form in get_args(Gate)}
    exact = [form for form, value in made.items() if torch.equal(value, gate)]
    rtol = 1e-2 if gate.dtype.itemsize < 4 else 1e-5
    close = [form for form, value in made.items() if torch.allclose(value.float(), gate.float(), rtol=rtol, atol=0)]
    return next(iter([*exact, *close]), None)


def _layer_of(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The decoder layer of a router: its outermost ancestor that is an item of a list of modules."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(modules[".".join(parts[:end])], nn.ModuleList):
            return modules[".".join(parts[: end + 1])]
    return modules[""]
