"""Run by two processes: each case trains by both ranks and by this process alone, and rank 0 writes how far they are apart."""

import dataclasses
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from nearpolicy.errors import DataError, EngineError
from nearpolicy.methods import method
from nearpolicy.mixture import Mixture
from nearpolicy.objective.full_kl import reverse_kl
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import LoraOptions, add_lora
from nearpolicy.policy.rank_plan import plan_ranks
from nearpolicy.policy.sharded import ShardedPolicy
from nearpolicy.policy.teacher import LocalTeacher
from nearpolicy.policy.tiny import character_tokenizer, tiny_model
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.trainer.checkpoint import load_optimizer_tensors, optimizer_tensors
from nearpolicy.trainer.ranks import AGREED, COLLECTIVE, Member, RankedSampler, RankedStepper, RankedTeacher, ranked_scores
from nearpolicy.trainer.step import StepOptions, Stepper, score_trained
from nearpolicy.trainer.team import Lost, Team, leading
from tests.builders import random_batch
from tests.policy.models import tiny

PLAIN = {"grad_clip": None, "kl_coefficient": 0.0, "kl_estimator": "k2", "entropy_coefficient": 0.0}
CASES = {
    "vespo": {"method": "vespo"},
    "grpo, clipped": {"method": "grpo", "options": {"grad_clip": 0.01}},
    "gspo, padded rows": {"method": "gspo", "shared": "off"},
    "m2po": {"method": "m2po"},
    "iw_opd": {"method": "iw_opd", "teacher": True},
    "ideal weights": {"method": "iw_opd", "method_options": {"weight": "ideal"}, "teacher": True},
    "full vocabulary": {"method": "opd", "teacher": True, "full": True},
    "mixture": {"method": "vespo", "teacher": True, "mixture": True},
    "kl and entropy": {"method": "vespo", "options": {"kl_coefficient": 0.3, "entropy_coefficient": 0.1}, "reference": True},
    "rows without gradient": {"method": "vespo", "still": True},
    "one row": {"method": "vespo", "rows": 1},
    "nothing trained": {"method": "vespo", "masked": True},
    "adapters": {"method": "vespo", "lora": True},
    "activations recomputed": {"method": "vespo", "recompute": True},
    "experts": {"method": "vespo", "model": "qwen3_moe"},
}
BUDGET = 12
"""Tokens: most rows then fill a micro-batch alone, so that five of them leave an empty step."""


def make_model(case, seed=1):
    model = tiny(case["model"]) if "model" in case else tiny_model(seed=seed)
    if case.get("lora"):
        torch.manual_seed(7)
        add_lora(model, LoraOptions(rank=4))
        for name, value in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.05)
    if case.get("recompute"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_policy(case, mesh=None):
    shared = case.get("shared", "auto")
    options = {"tokenizer": character_tokenizer(), "dtype": "float32", "token_budget": BUDGET, "shared_prompts": shared}
    return HFPolicy(make_model(case), **options) if mesh is None else ShardedPolicy(make_model(case), mesh=mesh, **options)


def make_teacher(policy):
    model = tiny_model(seed=2)
    shared = "auto" if policy.shares_prompts else "off"
    return LocalTeacher(HFPolicy(model, tokenizer=character_tokenizer(), dtype="float32", token_budget=BUDGET, shared_prompts=shared))


def make_stepper(case, policy, teacher, kind, adam=False):
    full = None
    if case.get("full"):

        def full(student, batch):
            kl_N = reverse_kl(student.head(batch), teacher.head(batch))
            return torch.zeros(batch.token_BT.shape).masked_scatter(batch.response_mask_BT, kl_N)

    parameters = policy.trainable_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True) if adam else torch.optim.SGD(parameters, lr=0.1)
    mixture = Mixture(row=method("opd"), use="add", coefficient=0.5) if case.get("mixture") else None
    chosen = method(case["method"], **case.get("method_options", {}))
    return kind(
        policy,
        chosen,
        optimizer,
        StepOptions(**PLAIN | case.get("options", {}), steps=3),
        lambda _: 1e-3 if adam else 0.1,
        mixture=mixture,
        full=full,
    )


def make_batch(case, seed):
    rows = case.get("rows", 5)
    batch = random_batch(rows=rows, group_size=1, seed=seed)
    if case.get("still"):
        batch = dataclasses.replace(batch, advantage_BT=batch.advantage_BT * (torch.arange(rows) % 2)[:, None])
    if case.get("masked"):
        batch = dataclasses.replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    columns = {}
    if case.get("teacher"):
        noise = torch.randn(batch.token_BT.shape, generator=torch.Generator().manual_seed(seed))
        columns = {"logp_teacher_BT": torch.where(batch.response_mask_BT, -3 + 0.3 * noise, 0.0), "logp_proximal_BT": batch.logp_behavior_BT}
    if case.get("reference"):
        columns["logp_reference_BT"] = torch.where(batch.response_mask_BT, batch.logp_behavior_BT - 0.1, 0.0)
    return dataclasses.replace(batch, **columns)


class Work(Member):
    """A `Member` whose parts are those of a case."""

    def __init__(self, team):
        super().__init__(team)
        self.mesh = team.mesh()
        team.handlers |= {"case": self.case, "restore": self.restore, "fail": self.fail}

    def case(self, share):
        case, adam = share
        policy = make_policy(case, self.mesh)
        teacher = make_teacher(policy)
        stepper = make_stepper(case, policy, teacher, RankedStepper, adam)
        stepper.team = self.team
        names = {id(p): n for n, p in policy.model.named_parameters()}
        trained = lambda: {n: p.detach() for n, p in policy.model.named_parameters() if p.requires_grad}
        self.learner = SimpleNamespace(stepper=stepper, optimizer=stepper.optimizer, names=names, teacher=teacher, reference=None, trained=trained)
        self.policy = policy
        self.sampler = TorchSampler(tiny_model(seed=1), character_tokenizer())

    def restore(self, state):
        load_optimizer_tensors(self.learner.optimizer, self.learner.names, state[0])
        self.policy.load_trained(state[1])

    def fail(self, how):
        if how == "answer" and self.team.rank == 1:
            raise DataError("rows", got="none", expected="some", do="Look.")
        if how == "bug" and self.team.rank == 1:
            raise ZeroDivisionError("a bug")


def distance(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k].cpu()).abs().max()) for k in a)


def compare(team, work, case):
    """Three updates of each, on uneven rows; the largest differences."""
    team.call("case", [(case, False)] * team.size)
    ours, alone_policy = work.learner.stepper, make_policy(case)
    work.policy.together = ranked_scores(team, "score", work.policy, empty_steps=True)
    alone = make_stepper(case, alone_policy, make_teacher(alone_policy), Stepper)
    out = {"weights": 0.0, "metrics": 0.0, "logp": 0.0, "token weights": 0.0, "empty steps": 0, "moved": 0.0}
    first = {k: v.clone() for k, v in alone_policy.published_weights().items()}
    for step in range(3):
        batch = make_batch(case, 10 * step + 3)
        out["empty steps"] += sum(not rows for rows_R in plan_ranks(batch, BUDGET, 2, padded=not alone_policy.shares_prompts) for rows in rows_R)
        out["logp"] = max(out["logp"], float((score_trained(work.policy, batch) - score_trained(alone_policy, batch)).abs().max()))
        a, b = alone.update(batch, step), ours.update(batch, step)
        out["token weights"] = max(out["token weights"], float((a.weight_BT - b.weight_BT).abs().max()))
        assert a.metrics.keys() == b.metrics.keys(), a.metrics.keys() ^ b.metrics.keys()
        for name, value in a.metrics.items():
            x, y = value.value, b.metrics[name].value
            if not name.startswith("time/") and not (x != x and y != y):
                out["metrics"] = max(out["metrics"], abs(x - y) / max(abs(x), 1e-3))
        whole = team.call("weights", [None, None])[0]
        out["weights"] = max(out["weights"], distance(alone_policy.published_weights(), whole))
    out["moved"] = distance(first, whole)
    return out


def checkpoints(team, work):
    """Across rank counts, AdamW: what two ranks save, one restores and saves as equal bits, and the reverse; then both go on alike."""
    case = {"method": "vespo"}
    team.call("case", [(case, True)] * team.size)
    for step in range(2):
        work.learner.stepper.update(make_batch(case, step), step)
    saved = team.call("trained", [None, None])[0]
    alone = make_stepper(case, make_policy(case), None, Stepper, adam=True)
    names = {id(p): n for n, p in alone.policy.model.named_parameters()}
    load_optimizer_tensors(alone.optimizer, names, saved[0])
    alone.policy.load_trained(saved[1])
    same = lambda a, b: a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    own = {n: p.detach() for n, p in alone.policy.model.named_parameters()}
    out = {"two to one": same(saved[0], optimizer_tensors(alone.optimizer, names)) and same(saved[1], own), "parameters": len(saved[1])}
    alone.update(make_batch(case, 2), 2)
    state = (optimizer_tensors(alone.optimizer, names), own)
    team.call("restore", [state] * team.size)
    again = team.call("trained", [None, None])[0]
    out["one to two"] = same(again[0], state[0]) and same(again[1], state[1])
    out["published"] = same(team.call("weights", [None, None])[0], alone.policy.published_weights())
    work.learner.stepper.update(make_batch(case, 3), 3)
    alone.update(make_batch(case, 3), 3)
    out["after one more update"] = distance(alone.policy.published_weights(), team.call("weights", [None, None])[0])
    return out


def sampling(team, work):
    """Split requests and split teachers against one process: equal tokens, in order; weights reach every rank."""
    team.call("case", [({"method": "vespo"}, False)] * team.size)
    sampler, own = RankedSampler(team, work.sampler), TorchSampler(tiny_model(seed=5), character_tokenizer(), version=4)
    sampler.load(dict(own.model.state_dict()), 4)
    prompts = [SimpleNamespace(id=str(k), token_P=torch.arange(3, 5 + k % 3).numpy(), text="", columns={}) for k in range(5)]
    requests = [Request(ticket=k, prompt=p) for k, p in enumerate(prompts)]
    params = SamplingParams(max_tokens=6, eos_ids=frozenset({1}))
    a, b = own.sample(requests, 3, params), sampler.sample(requests, 3, params)
    place = lambda r: (r.group, r.sample, r.response_T.tolist(), int(r.version_T[0]))
    taught, alone = RankedTeacher(team, work.learner.teacher).score(a), work.learner.teacher.score(a)
    return {"same": [place(r) for r in a] == [place(r) for r in b], "responses": len(b), "version": sampler.version,
            "teacher": max(float(abs(x - y).max()) for x, y in zip(taught, alone, strict=True))}  # fmt: skip


def errors(team, work):
    """An answer that is an error leaves the team whole; so does a gradient that is not finite, with the weights as they were."""
    said = {}
    for how in ("answer", "bug"):
        try:
            team.call("fail", [how] * team.size)
        except (DataError, EngineError) as error:
            said[how] = f"{type(error).__name__} {error}"
    case = {"method": "vespo"}
    team.call("case", [(case, False)] * team.size)
    before = team.call("weights", [None, None])[0]
    batch = make_batch(case, 1)
    wrong = dataclasses.replace(batch, advantage_BT=batch.advantage_BT * torch.where(torch.arange(5) == 4, 1e37, 1.0)[:, None])
    try:
        work.learner.stepper.update(wrong, 0)
    except EngineError as error:
        said["not finite"] = f"{type(error).__name__} {error}"
    said["untouched"] = distance(before, team.call("weights", [None, None])[0])
    said["goes on"] = work.learner.stepper.update(batch, 0).metrics["train/grad_norm"].value
    return said


def threads_left():
    """Threads that may be in the store's C++ code when the interpreter ends."""
    return [t.name for t in threading.enumerate() if t.name == "sign of life"]


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    team = Team(device="cpu", deadline_s=60, collective=COLLECTIVE, agreed=AGREED)
    work = Work(team)
    if team.rank:
        code = team.serve()
        sys.exit("a thread is left" if threads_left() else code)
    with leading(team):
        found = {name: compare(team, work, case) for name, case in CASES.items()}
        found |= {"checkpoints": checkpoints(team, work), "sampling": sampling(team, work), "errors": errors(team, work)}
    try:
        team.call("case", [])
    except Lost as error:
        found["ended"] = str(error)
    found["threads left"] = threads_left()
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
