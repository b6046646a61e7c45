"""Demonstration rows: what they carry, where they come from, and what is refused."""

import gzip
import json

import numpy as np
import pytest
import torch

from nearpolicy.errors import DataError, UsageError
from nearpolicy.objective.advantages import group_advantages
from nearpolicy.protocols import SamplingParams
from nearpolicy.rollout import Outcome, Prompt, Score, Source, StopReason
from nearpolicy.schedule.sync import SyncOptions, SyncSchedule
from nearpolicy.sources.cuts import length_ratio
from nearpolicy.sources.demonstrations import DemonstrationSource, Encoder
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.sources.relay import RelayOptions, RelaySource
from nearpolicy.tasks.arithmetic import ArithmeticTask, arithmetic
from nearpolicy.tasks.rows import FileTask
from nearpolicy.tasks.solutions import of_column, of_file, of_task, several
from nearpolicy.testing.fakes import FakeSampler, FakeTokenizer

TOKENIZER = FakeTokenizer(special=(0,))
V, LIMIT = 8, 6


def encoder(**changes):
    return Encoder(**({"encode": TOKENIZER.encode, "eos_id": 0, "eos_ids": frozenset({0}), "vocabulary": V, "max_tokens": LIMIT} | changes))


def source(solutions, *, per_group=1, inner=None, entropy=False):
    params = SamplingParams(max_tokens=LIMIT, eos_ids=frozenset({0}), seed=1, entropy=entropy, temperature=0.8)
    inner = inner or FreshSource(FakeSampler(torch.zeros(V, V), tokenizer=TOKENIZER), params)
    return DemonstrationSource(
        inner, solutions=solutions, encoder=encoder(), per_group=per_group, params=params,
        decode=lambda ids: TOKENIZER.decode(ids.tolist(), skip_special_tokens=True),
    )  # fmt: skip


def prompt(cursor=0, **columns):
    return Prompt(id=f"p{cursor}", token_P=np.array([1, 2]), text="bc", columns={"prompt": "bc", **columns})


def test_the_last_members_of_each_group_are_demonstrations():
    made = source(lambda p: ["cde", [3, 3, 0]], per_group=2)
    group, other = made.write([(7, prompt(0), 0), (8, prompt(1), 0)], 5)
    assert [(r.group, r.sample) for r in group + other] == [(t, i) for t in (7, 8) for i in range(5)]
    assert [r.source for r in group] == [Source.FRESH] * 3 + [Source.DEMONSTRATION] * 2
    text, ids = group[3:]
    assert (text.response_T.tolist(), ids.response_T.tolist()) == ([2, 3, 4, 0], [3, 3, 0])
    assert (text.text, ids.text) == ("cde", "dd")
    for r in (text, ids):
        assert r.logp_behavior_T is None
        assert r.version_T.tolist() == [-1] * len(r.response_T)
        assert (r.stop, r.temperature, r.prefix_length, r.oldest_version) == (StopReason.EOS, 0.8, 0, None)
        assert r.prompt_P.tolist() == [1, 2]
    assert made.tokens_decoded == sum(r.num_sampled for g in (group, other) for r in g[:3])


class Judge:
    def score(self, items):
        return [Score(reward=float(i.completion == "cde"), outcome=Outcome.SCORE) for i in items]

    def close(self):
        pass


def schedule(made, group_size=4, updates=1):
    options = SyncOptions(
        prompts=2, group_size=group_size, updates_per_rollout=updates, baseline="mean", normalize_std=False, dynamic_sampling=False, max_redraws=3,
        max_tokens=LIMIT, overlong_buffer=None, mask_truncated=False,
    )  # fmt: skip
    return SyncSchedule(options, source=made, verifier=Judge(), prompt_at=prompt, publish=lambda v: None, annotate=lambda b: b)


@pytest.mark.parametrize("entropy", [False, True])
def test_scored_like_the_rest_and_left_out_of_rewards_and_ages(entropy):
    made = schedule(source(lambda p: ["cde"], entropy=entropy), updates=2)
    batch, metrics = made.next(3), made.metrics()
    assert batch.off_policy_B.tolist() == [False, False, False, True]
    assert batch.reward_B[3] == 1
    whole = torch.tensor([s.score.reward for s in made.last_scored])
    want = group_advantages(whole, torch.tensor([0] * 4 + [1] * 4), baseline="mean", normalize_std=False).advantage_B[:4]
    assert torch.equal(batch.advantage_BT.gather(1, batch.prompt_length_B[:, None]).squeeze(1), want)
    assert (batch.version_BT[3][batch.response_mask_BT[3]] == -1).all()
    assert not batch.logp_behavior_BT[3].any()
    others = [s for s in made.last_scored if s.rollout.source is Source.FRESH]
    assert metrics["reward/mean"].value == pytest.approx(np.mean([s.score.reward for s in others]))
    assert metrics["response/length"].value == pytest.approx(np.mean([len(s.rollout.response_T) for s in others]))
    assert metrics["demonstration/frac"].value == 0.25
    assert metrics["demonstration/reward"].value == 1
    assert metrics["demonstration/length"].value == 4
    assert (metrics["stale/age_mean"].value, metrics["stale/age_max"].value) == (3.0, 3.0)  # the fake's version is 0
    assert (batch.entropy_behavior_BT is not None) == entropy
    if entropy:
        inside = batch.response_mask_BT
        assert batch.entropy_behavior_BT[3][inside[3]].isnan().all()
        assert not batch.entropy_behavior_BT[:3][inside[:3]].isnan().any()


def test_beside_relayed_members(tmp_path):
    params = SamplingParams(max_tokens=LIMIT, eos_ids=frozenset({0}), seed=1)
    options = RelayOptions(refresh=2, relayed=2, shared=False, groups=2, chunk=2, entropy=False)
    relay = RelaySource(FakeSampler(torch.zeros(V, V), tokenizer=TOKENIZER), params, length_ratio(0.5), options=options, folder=tmp_path, run="me")
    made = schedule(source(lambda p: ["cde"], inner=relay))
    made.next(0)
    batch = made.next(1)
    assert batch.source_B == (Source.RELAY, Source.RELAY, Source.FRESH, Source.DEMONSTRATION) * 2
    assert "files" not in made.state_dict()["source"]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([], "0 demonstrations"), (["cdecde"], "7 tokens"), ([[3, 8]], "token id 8"), ([[3, -1]], "token id -1"), ([""], "an empty one"),
        ([[]], "an empty one"), ([3.5], "text or a list of token ids"), ([[1, True]], "text or a list of token ids"), (["cz"], "token id 25"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused_by_name(found, says):
    with pytest.raises(DataError, match=says) as error:
        source(lambda p: found).write([(0, prompt(), 0)], 2)
    assert "prompt 'p0'" in str(error.value)
    assert "\n" not in str(error.value)


def test_text_without_a_token_of_its_own_is_refused_and_an_unknown_id_that_ends_responses_is_not():
    """Some tokenizers give their unknown token for such text; others (GPT-2) name their end-of-sequence token as the unknown one."""
    with pytest.raises(DataError, match=r"p0: demonstration: got 'cdc', with text that the tokenizer knows no token for"):
        encoder(unknown_id=3).ids("cdc", "p0")
    assert encoder(unknown_id=3).ids([2, 3], "p0").tolist() == [2, 3, 0]
    assert encoder(unknown_id=0).ids("c", "p0").tolist() == [2, 0]
    assert encoder(unknown_id=2, eos_ids=frozenset({0, 2})).ids("c", "p0").tolist() == [2]


def test_a_demonstration_of_exactly_the_limit_is_fine():
    assert len(source(lambda p: ["cdecd"]).check(prompt())[0]) == LIMIT
    with pytest.raises(DataError, match="per_group = 2"):
        source(lambda p: ["c"], per_group=2).check(prompt())


@pytest.mark.parametrize("strategies", [None, 3])
def test_the_arithmetic_task_writes_right_solutions(strategies):
    task = ArithmeticTask(strategies=strategies, num_ops=4)
    find = of_task(task)
    for i in range(30):
        row = task.train.row(i)
        found = find(Prompt(id=row.id, token_P=np.array([1]), text="", columns={**row.columns, "prompt": row.prompt}))
        assert len(found) == 2
        assert len(found[0]) > len(found[1])
        assert arithmetic([row.prompt] * 2, found, answer=[row.columns["answer"]] * 2) == [1.0, 1.0]
        assert all(len(text) < task.max_tokens for text in found)


def rows_file(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_columns_hold_one_solution_or_several():
    assert of_column("s")(prompt(s="abc")) == ["abc"]
    assert of_column("s")(prompt(s=["abc", [1, 2]])) == ["abc", [1, 2]]
    assert of_column("s")(prompt(s=[1, 2])) == [[1, 2]]
    assert of_column("s")(prompt()) == of_column("s")(prompt(s="")) == []
    assert several([[1, 2], [3]]) == [[1, 2], [3]]


def test_data_files_have_them_in_their_usual_columns(tmp_path):
    with_own = FileTask(rows_file(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "1", "completion": "c1"}]), heldout=0)
    assert of_task(with_own)(prompt(completion="c1")) == ["c1"]
    without = FileTask(rows_file(tmp_path / "b.jsonl", [{"prompt": "p", "answer": "1"}]), heldout=0)
    with pytest.raises(UsageError, match=r"rollout\.demonstrations\.column"):
        of_task(without)


def test_a_file_of_solutions_is_found_by_id_or_prompt(tmp_path):
    records = [{"id": "p0", "solution": "x"}, {"prompt": "bc", "solution": ["y", [1, 2]]}, {"id": "p0", "completion": "z"}]
    find = of_file(rows_file(tmp_path / "s.jsonl", records))
    assert find(prompt(0)) == ["x", "z"]
    assert find(prompt(1)) == ["y", [1, 2]]
    assert find(Prompt(id="other", token_P=np.array([1]), text="other")) == []
    with gzip.open(tmp_path / "s.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "p0", "mine": "x"}) + "\n")
    assert of_file(tmp_path / "s.jsonl.gz", "mine")(prompt(0)) == ["x"]


@pytest.mark.parametrize(
    ("records", "says"),
    [([], "no records"), ([{"id": "p0"}], "s.jsonl:1"), ([{"solution": "x"}], "id or prompt"), ([{"id": "p0", "solution": ""}], "s.jsonl:1")],
)
def test_a_file_of_solutions_that_lacks_something(tmp_path, records, says):
    with pytest.raises(DataError, match=says):
        of_file(rows_file(tmp_path / "s.jsonl", records))


def test_no_such_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        of_file(tmp_path / "absent.jsonl")
