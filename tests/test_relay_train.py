"""Whole runs with relayed rollouts and with demonstrations: the plain run where nothing is relayed, resumable inside a cycle, one clear line."""

import errno
import json
import math
import os
import signal
import subprocess

import pytest

from nearpolicy import build
from nearpolicy.build import config_for, train
from nearpolicy.build_source import fingerprint
from nearpolicy.check import build_method, describe_config, refuse
from nearpolicy.errors import CheckpointError, NearPolicyError, UsageError
from nearpolicy.policy.tiny import make_tiny
from nearpolicy.rollout import Outcome, Score
from nearpolicy.sources.bank import SeedBank
from nearpolicy.tasks.arithmetic import arithmetic
from tests.data.rewards import digits
from tests.test_train import command, parts, refused, rows, timeless, wait_for, weights

RELAY = ["rollout.source=relay", "rollout.refresh=3", "schedule.updates_per_rollout=2", "train.steps=10", "method.name=dapo"]
NO_EVAL = ["task.heldout=0", "log.rollouts_every=0"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


class InProcess:
    """The reward pool's place without its start-up time: the dense reward `digits`, or the task's own."""

    def __init__(self, reward, **_):
        self.own = reward.rewards[0].function.endswith("arithmetic")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def score(self, items):
        texts = [i.completion for i in items]
        values = arithmetic([], texts, answer=[i.columns["answer"] for i in items]) if self.own else digits([], texts)
        return [Score(reward=v, outcome=Outcome.SCORE) for v in values]


@pytest.fixture(scope="module", autouse=True)
def in_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "RewardPool", InProcess)
        yield


def run(tiny, out, *more, resume=False):
    said = []
    train(config_for(parts(tiny, *more, reward="digits")), out, resume=resume, report=False, say=said.append)
    return said


def shared(a, b):
    """The metrics that two runs have in common, without times and what a seed bank costs."""
    names = set(a[0]) & set(b[0]) - {"data/tokens_sampled"}
    return ([{k: r.get(k) for k in names if not k.startswith("time")} for r in side] for side in (a, b))


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """Fresh runs, without and with dynamic sampling."""
    folder = tmp_path_factory.mktemp("plain")
    for dynamic in ("false", "true"):
        run(tiny, folder / dynamic, *RELAY[2:], *NO_EVAL, f"rollout.dynamic_sampling={dynamic}")
    return folder


@pytest.mark.parametrize(
    ("more", "dynamic"),
    [(["rollout.cut.ratio=0"], "false"), (["rollout.cut.ratio=0"], "true"), (["rollout.relayed_per_group=0"], "false"),
     (["rollout.refresh=1"], "false")],
)  # fmt: skip
def test_nothing_relayed_is_the_plain_run_bit_for_bit(tiny, plain, tmp_path, more, dynamic):
    run(tiny, tmp_path / "relay", *RELAY, *NO_EVAL, f"rollout.dynamic_sampling={dynamic}", *more)
    assert weights(plain / dynamic, 10) == weights(tmp_path / "relay", 10)
    ours, theirs = shared(rows(tmp_path / "relay"), rows(plain / dynamic))
    assert ours == theirs


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(tiny, out, *RELAY, "checkpoint.every=1")
    return out


def test_a_relayed_run_says_where_each_token_comes_from(whole):
    """T = 3, N = 2: batches at updates 1, 3, 5 and again 7, 9; the bank at 1 and 7."""
    logged = rows(whole)
    assert [r.get("relay/relayed_frac") for r in logged[::2]] == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert [r.get("relay/prefix_age") for r in logged] == [None, None, 2, 3, 4, 5, None, None, 2, 3]
    assert [r["stale/age_max"] for r in logged] == [0, 1] * 5
    assert ["relay/bank_tokens" in r for r in logged[::2]] == [True, False, False, True, False]
    for r in logged:
        if r.get("relay/bank_tokens"):
            # 5 bytes a response and the header, which weighs in a bank this small.
            assert r["relay/bank_bytes"] <= 12 * r["relay/bank_tokens"] + 5 * 32 + 1000
    for before, after in zip(logged[::2], logged[2::2], strict=False):
        decoded = after["data/tokens_sampled"] - before["data/tokens_sampled"]
        assert decoded == after["relay/tokens_decoded"] + after.get("relay/bank_tokens", 0)
    sampled = [json.loads(line) for file in sorted((whole / "rollouts").iterdir()) for line in _lines(file)]
    relayed = [s for s in sampled if s["source"] == "relay"]
    assert relayed
    for s in relayed:
        k = s["prefix_length"]
        assert k == round(0.7 * k / 0.7)
        assert len(set(s["version"][:k])) <= 1
        assert len(set(s["version"][k:])) <= 1
        assert not k or k == len(s["version"]) or s["version"][0] < s["version"][-1]


def _lines(file):
    import gzip

    return gzip.open(file, "rt").read().splitlines()


@pytest.mark.parametrize("cut", [2, 3, 6, 7])
def test_resumed_inside_a_cycle_equals_uninterrupted_bit_for_bit(tiny, whole, tmp_path, cut):
    """At the end of batch 1 (2), inside batch 2 (3), at the end of the cycle (6) and inside the next one (7)."""
    run(tiny, tmp_path / "a", *RELAY, f"train.steps={cut}")
    run(tiny, tmp_path / "a", *RELAY, resume=True)
    assert weights(whole, 10) == weights(tmp_path / "a", 10)
    optimizer = "checkpoints/step-000010/trainer/optimizer.safetensors"
    assert (whole / optimizer).read_bytes() == (tmp_path / "a" / optimizer).read_bytes()
    got, want = ([{k: v for k, v in r.items() if "/hist" not in k and not k.startswith("position")} for r in timeless(rows(o))]
                 for o in (tmp_path / "a", whole))  # fmt: skip
    assert got == want


def test_checkpoints_inside_a_cycle_hold_the_bank_and_the_last_of_a_cycle_does_not(whole):
    held = {p.name: sorted(f.name for f in (p / "trainer").glob("seeds-*")) for p in (whole / "checkpoints").iterdir()}
    first, second = ["seeds-000000.safetensors"], ["seeds-000006.safetensors"]
    assert held == {f"step-{i:06d}": want for i, want in zip(range(1, 11), [first] * 4 + [[]] * 2 + [second] * 4, strict=True)}
    assert [p.name for p in (whole / "seeds").iterdir()] == second


def test_a_resume_needs_only_its_checkpoint(tiny, whole, tmp_path):
    """The run's own copy of the bank is gone, or a later one lies there."""
    import shutil

    run(tiny, tmp_path / "a", *RELAY, "train.steps=4")
    shutil.rmtree(tmp_path / "a" / "seeds")
    (tmp_path / "a" / "seeds").mkdir()
    shutil.copy(whole / "seeds" / "seeds-000006.safetensors", tmp_path / "a" / "seeds")
    run(tiny, tmp_path / "a", *RELAY, resume=True)
    assert weights(whole, 10) == weights(tmp_path / "a", 10)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_cycle(tiny, tmp_path):
    more = [*RELAY, *NO_EVAL, "rollout.refresh=30", "train.steps=4000", "checkpoint.every=3"]
    process = subprocess.Popen(command(tiny, tmp_path / "a", *more, reward="digits"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "a" / "metrics.jsonl", 8, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)
    done = max(int(p.name[5:]) for p in (tmp_path / "a" / "checkpoints").iterdir())
    goal = done + 4
    run(tiny, tmp_path / "a", *more, f"train.steps={goal}", resume=True)
    run(tiny, tmp_path / "b", *more, f"train.steps={goal}")
    assert weights(tmp_path / "a", goal) == weights(tmp_path / "b", goal)


def test_a_truncated_bank_makes_its_checkpoint_incomplete(tiny, whole, tmp_path):
    out = tmp_path / "a"
    run(tiny, out, *RELAY, "train.steps=4", "checkpoint.every=1")
    banks = [out / "checkpoints" / f"step-{step:06d}" / "trainer" / "seeds-000000.safetensors" for step in (4, 3, 2, 1)]
    data = banks[0].read_bytes()

    def truncate(some):
        for bank in some:
            bank.unlink()
            bank.write_bytes(data[: len(data) // 2])

    truncate(banks[:2])
    said = run(tiny, out, *RELAY, "train.steps=6", resume=True)
    assert sum("seeds-000000.safetensors missing or damaged" in line for line in said) == 2
    assert weights(out, 6) == weights(whole, 6)


def test_a_bank_of_another_run_is_refused(tiny, whole):
    path = whole / "checkpoints" / "step-000003" / "trainer" / "seeds-000000.safetensors"
    own, other = (fingerprint(config_for(parts(tiny, *RELAY, more, reward="digits"))) for more in ("seed=0", "seed=1"))
    assert SeedBank(path, run=own).num_tokens > 0
    with pytest.raises(CheckpointError, match="another run"):
        SeedBank(path, run=other)
    longer = [*RELAY, "train.steps=99", "eval.every=7", "log.every=2"]
    assert fingerprint(config_for(parts(tiny, *longer, reward="digits"))) == own


def test_a_resume_with_a_foreign_bank_ends_in_one_line(tiny, whole, tmp_path, monkeypatch):
    """Even where the checkpoint's manifest was made to fit it."""
    from nearpolicy.trainer import checkpoint as module

    run(tiny, tmp_path / "a", *RELAY, "seed=1", "train.steps=3")
    own = tmp_path / "a" / "checkpoints" / "step-000003" / "trainer" / "seeds-000000.safetensors"
    own.unlink()
    own.write_bytes((whole / "checkpoints" / "step-000003" / "trainer" / "seeds-000000.safetensors").read_bytes())
    monkeypatch.setattr(module, "verify", lambda folder: None)
    with pytest.raises(CheckpointError, match="truncated or damaged") as error:
        run(tiny, tmp_path / "a", *RELAY, "seed=1", "train.steps=6", resume=True)
    assert "\n" not in str(error.value)


def test_a_full_disk_while_the_bank_is_written_loses_nothing(tiny, whole, tmp_path, monkeypatch):
    from nearpolicy.sources import bank as module

    real, count = module.save_file, [0]

    def second_fails(*words, **options):
        count[0] += 1
        if count[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", second_fails)
        with pytest.raises(NearPolicyError, match="no space left") as error:
            run(tiny, tmp_path / "a", *RELAY)
    assert "\n" not in str(error.value)
    assert weights(tmp_path / "a", 6) == weights(whole, 6)
    run(tiny, tmp_path / "a", *RELAY, resume=True)
    assert weights(tmp_path / "a", 10) == weights(whole, 10)


CUTS = """
import numpy as np

def third(length, entropies, rng):
    assert entropies is not None and len(entropies) == length
    return length // 3

def share(length, entropies, rng, *, of=2):
    return length // of

def beyond(length, entropies, rng):
    return length + 1

def negative(length, entropies, rng):
    return -1

def raises(length, entropies, rng):
    raise RuntimeError("no cut today")

constant = 3
"""


@pytest.fixture
def cuts(tmp_path):
    (tmp_path / "cuts.py").write_text(CUTS)
    return tmp_path / "cuts.py"


@pytest.mark.parametrize(
    "more",
    [
        [
            "rollout.cut.kind=top_entropy",
            "rollout.cut.k=2",
            "rollout.prefix_tokens=mask",
            "rollout.dynamic_sampling=true",
            "rollout.overlong_buffer=4",
        ],
        ["rollout.cut.kind=random_ratio", "rollout.prefix=shared_in_group", "rollout.relayed_per_group=3", "model.lora.rank=2"],
        ["rollout.cut.ratio=1", "ratio.denominator=proximal"],
        ["method.name=grpo", "method.correction=token_truncate", "train.kl_coefficient=0.1"],
    ],
)
def test_every_switch_trains_and_resumes_exactly(tiny, tmp_path, more):
    words = [*RELAY, *NO_EVAL, *more, "train.steps=6", "checkpoint.every=3"]
    run(tiny, tmp_path / "whole", *words)
    run(tiny, tmp_path / "cut", *words, "train.steps=3")
    run(tiny, tmp_path / "cut", *words, resume=True)
    assert weights(tmp_path / "whole", 6) == weights(tmp_path / "cut", 6)
    assert weights(tmp_path / "whole", 6) != weights(tmp_path / "whole", 3)


def test_a_cut_of_ones_own(tiny, tmp_path, cuts):
    base = [*RELAY, *NO_EVAL, "train.steps=4"]
    run(tiny, tmp_path / "third", *base, "rollout.cut.kind=function", f'rollout.cut.function="{cuts}:third"')
    share = rows(tmp_path / "third")[2]["relay/prefix_frac"]
    assert 0 < share < 0.5
    run(tiny, tmp_path / "a", *base, "rollout.cut.kind=function", f'rollout.cut.function="{cuts}:share"', "rollout.cut.options={of=3}")
    assert weights(tmp_path / "a", 4) == weights(tmp_path / "third", 4)


@pytest.mark.parametrize(
    ("name", "says"),
    [("beyond", "expected a whole number of tokens from 0 to"), ("negative", "got -1"), ("raises", "no cut today"), ("third:x", "cut.function"),
     ("absent", "no 'absent'"), ("constant", "got a int")],
)  # fmt: skip
def test_a_cut_that_fails_ends_in_one_line(tiny, tmp_path, cuts, name, says):
    out = tmp_path / "run"
    words = parts(tiny, *RELAY, *NO_EVAL, "rollout.cut.kind=function", f'rollout.cut.function="{cuts}:{name}"')
    assert says in refused("train", *words, "--out", str(out))
    runs_first = name in ("beyond", "negative", "raises")
    assert out.exists() == runs_first
    if runs_first:  # what batch 1 taught is kept
        assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.parametrize("name", ["reinforce", "gspo", "sapo", "cispo", "gmpo", "topr", "m2po"])
def test_every_method_trains_on_relayed_data(tiny, tmp_path, name):
    run(tiny, tmp_path / "a", *RELAY, *NO_EVAL, f"method.name={name}", "train.steps=4")
    logged = rows(tmp_path / "a")
    assert max(r["train/grad_norm"] for r in logged) > 0
    assert logged[2]["relay/relayed_frac"] == 1
    # The ratio to whoever wrote the token: 1 on the suffix, off 1 on the prefix once the policy has moved.
    assert logged[2]["policy/kl_behavior_k3"] > 1e-7


def test_segments_are_the_default_of_sequence_weights(tiny, tmp_path):
    for scope in ("segment", "response"):
        run(tiny, tmp_path / scope, *RELAY, *NO_EVAL, "method.name=vespo", "train.steps=4", f"ratio.scope={scope}")
    run(tiny, tmp_path / "default", *RELAY, *NO_EVAL, "method.name=vespo", "train.steps=4")
    assert weights(tmp_path / "default", 4) == weights(tmp_path / "segment", 4) != weights(tmp_path / "response", 4)


LUFFY = ["method.name=luffy", "schedule.updates_per_rollout=2", "train.steps=4", "rollout.max_tokens=12", "rollout.demonstrations.per_group=1"]


OWN = 'task.rewards=[{function="arithmetic"}]'


@pytest.mark.parametrize(
    "more",
    [
        ["method.variant=released_script", "rollout.demonstrations.per_group=2"],
        ["train.kl_coefficient=0.1", "train.entropy_coefficient=0.001", "log.behavior_entropy=true"],
        ["ratio.denominator=proximal"],
    ],
)
def test_luffy_trains_on_demonstrations(tiny, tmp_path, more):
    run(tiny, tmp_path / "a", *NO_EVAL, *LUFFY, OWN, *more)
    first = rows(tmp_path / "a")[0]
    assert first["demonstration/frac"] == (2 if "rollout.demonstrations.per_group=2" in more else 1) / 4
    assert first["demonstration/reward"] == 1
    assert first["reward/mean"] < 0.5
    assert first["weight/ess_raw"] == pytest.approx(1, abs=1e-3)  # of the policy's own rows, which are fresh
    assert [r["stale/age_max"] for r in rows(tmp_path / "a")] == [0, 1, 0, 1]
    assert all(math.isfinite(r["train/grad_norm"]) and r["train/grad_norm"] > 0 for r in rows(tmp_path / "a"))
    assert not any(math.isnan(v) for r in rows(tmp_path / "a") for v in r.values() if isinstance(v, float))


@pytest.mark.parametrize("more", [[], [*RELAY[:2], "rollout.relayed_per_group=2", "model.lora.rank=2"]])
def test_luffy_resumes_exactly(tiny, tmp_path, more):
    words = [*NO_EVAL, *LUFFY, OWN, *more]
    run(tiny, tmp_path / "whole", *words)
    run(tiny, tmp_path / "cut", *words, "train.steps=3")
    run(tiny, tmp_path / "cut", *words, resume=True)
    assert weights(tmp_path / "whole", 4) == weights(tmp_path / "cut", 4)


def test_demonstrations_teach_what_the_policy_cannot_find(tiny, tmp_path):
    """A random model all but never solves the task: hardly a group has a signal. With demonstrations all have, and their likelihood rises."""
    base = [*NO_EVAL, OWN, "method.name=luffy", "train.steps=10", "train.lr=3e-3", "schedule.updates_per_rollout=1", "rollout.max_tokens=12"]
    run(tiny, tmp_path / "without", *base)
    run(tiny, tmp_path / "with", *base, "rollout.demonstrations.per_group=1")
    without, shown = rows(tmp_path / "without"), rows(tmp_path / "with")
    assert sum(r["reward/no_signal_frac"] for r in without) > 0.8 * len(without)
    assert {r["reward/no_signal_frac"] for r in shown} == {0}
    assert sum(r["policy/objective"] for r in shown[-3:]) > sum(r["policy/objective"] for r in shown[:3])


M2PO = [*NO_EVAL, "method.name=m2po", "train.lr=3e-3", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def m2po(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("m2po")
    for name in ("paper", "released_code"):
        run(tiny, folder / name, *M2PO, f"method.variant={name}")
    return folder


def test_both_m2po_rules_are_full_runs_on_stale_data(m2po):
    for name in ("paper", "released_code"):
        logged = rows(m2po / name)
        assert [r["stale/age_max"] for r in logged] == [0, 1, 2, 3] * 2
        assert logged[0]["m2po/dropped_frac"] == 0  # fresh data: nothing to drop
        assert max(r["m2po/second_moment"] or 0 for r in logged) > 0.04
        assert max(r["m2po/dropped_frac"] for r in logged) > 0


def test_the_two_m2po_rules_part_where_the_budget_binds(m2po):
    paper, released = (rows(m2po / name) for name in ("paper", "released_code"))
    first = next(i for i, r in enumerate(paper) if (r["m2po/second_moment"] or 0) > 0.04)
    for i in range(first):
        assert weights(m2po / "paper", i + 1) == weights(m2po / "released_code", i + 1)
    assert released[first]["m2po/second_moment"] == paper[first]["m2po/second_moment"]
    assert released[first]["m2po/dropped_frac"] > paper[first]["m2po/dropped_frac"] > 0


def test_m2po_statistics_are_those_of_the_whole_optimizer_batch(tiny, m2po, tmp_path):
    """However it is split into micro-batches."""
    run(tiny, tmp_path / "split", *M2PO, "train.token_budget=40")
    whole, split = rows(m2po / "paper"), rows(tmp_path / "split")
    for i in range(next(i for i, r in enumerate(whole) if (r["m2po/second_moment"] or 0) > 0.04) + 1):
        for name in ("m2po/second_moment", "m2po/dropped_frac"):
            assert (split[i][name] or 0) == pytest.approx(whole[i][name] or 0, rel=1e-2, abs=1e-9), (i, name)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([*RELAY, "rollout.relayed_per_group=5"], "rollout.relayed_per_group: got 5; expected at most 4"),
        ([*RELAY, "method.name=luffy", "rollout.demonstrations.per_group=2", "rollout.relayed_per_group=3"], "expected at most 2"),
        ([*RELAY, "rollout.bank_limit=1", "rollout.refresh=4000"], "rollout.bank_limit"),
        ([*RELAY, "rollout.refresh=0"], "rollout.refresh = 0"),
        ([*RELAY, "rollout.cut.ratio=1.5"], "rollout.cut.ratio = 1.5"),
        (["rollout.refresh=4"], "rollout.source = relay"),
        (["rollout.demonstrations.per_group=1"], "luffy"),
        (["method.name=luffy", "rollout.demonstrations.per_group=4"], "fewer than the group"),
        (["method.name=luffy", "rollout.demonstrations.per_group=3"], "2 demonstrations"),
        (["method.name=luffy", "rollout.demonstrations.per_group=1", "rollout.max_tokens=4"], "rollout.max_tokens = 4"),
        (["method.name=luffy", "rollout.demonstrations.column=answers"], "0 demonstrations"),
        (["method.name=luffy", "rollout.demonstrations.path=/nonexistent.jsonl"], "/nonexistent.jsonl"),
    ],
)
def test_refused_with_one_clear_line_and_nothing_left(tiny, tmp_path, more, says):
    out = tmp_path / "run"
    assert says in refused("train", *parts(tiny, *more), "--out", str(out))
    assert not out.exists()


def test_demonstrations_of_a_file_are_all_checked_before_the_run(tiny, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}a+1=", "answer": "1", "shown": "#1" if i < 5 else [3, 4000]}) + "\n" for i in range(6)))
    words = [f'task={{kind="rows", path="{data}", heldout=0}}', "method.name=luffy", "rollout.demonstrations.column=shown"]
    line = refused("train", *parts(tiny, *words), "--out", str(tmp_path / "run"))
    assert "token id 4000" in line
    assert "rows.jsonl:6" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [(["rollout.cut.ratio=0"], "nothing of them is kept"), (["rollout.cut.ratio=1"], "replayed"), (["rollout.refresh=1"], "nothing is relayed"),
     (["rollout.relayed_per_group=0"], "nothing is relayed"), (["rollout.reserve=5"], "rollout.reserve does nothing"),
     (["rollout.reserve=5", "rollout.dynamic_sampling=true"], None), ([], None)],
)  # fmt: skip
def test_relays_that_do_nothing_are_warned_of(more, says):
    config = config_for(["tiny", *RELAY, *more])
    warned = [w for w in refuse(config, build_method(config)) if "rollout." in w]
    assert [says in w for w in warned] == ([True] if says else [])


@pytest.mark.parametrize(
    ("more", "says"),
    [(["rollout.prefix_tokens=mask"], "rollout.prefix_tokens: got mask with rollout.cut.ratio = 1"),
     (["rollout.prefix=shared_in_group"], "rollout.prefix: got shared_in_group with rollout.cut.ratio = 1")],
)  # fmt: skip
def test_whole_stored_responses_that_leave_nothing_to_train_on_are_refused(more, says):
    config = config_for(["tiny", *RELAY, "rollout.cut.ratio=1", *more])
    with pytest.raises(UsageError, match=says):
        refuse(config, build_method(config))
    some = config_for(["tiny", *RELAY, "rollout.cut.ratio=0.9", *more])
    assert refuse(some, build_method(some)) is not None


def test_a_scope_of_ratios_without_a_sum_is_warned_of():
    for name, expected in (("sapo", True), ("vespo", False)):
        config = config_for(["tiny", *RELAY, f"method.name={name}", "ratio.scope=response"])
        assert any("ratio.scope does nothing" in w for w in refuse(config, build_method(config))) == expected


def test_check_asks_for_cuts_and_demonstrations(tiny, cuts):
    words = parts(tiny, *RELAY, "rollout.cut.kind=function", f'rollout.cut.function="{cuts}:absent"')
    assert "no 'absent'" in refused("check", *words)
    assert "/nonexistent.jsonl" in refused("check", *parts(tiny, "method.name=luffy", "rollout.demonstrations.path=/nonexistent.jsonl"))


def test_check_says_what_a_cycle_is():
    config = config_for(["tiny", *RELAY, "rollout.dynamic_sampling=true"])
    text = describe_config(config, build_method(config), None)
    # (3 - 1) * 64 groups and a quarter of 3 * 64 more, 8 responses each, 5 + 12 * 56 bytes
    assert "# seed bank: 1408 responses, at most 0.9 MiB on disk" in text
    assert "# relay cycle: 3 rollout batches = 6 updates; 8 of 8 in each group relayed" in text
    assert "# worst-case age of a prefix: 5 updates" in text
