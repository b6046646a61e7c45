"""The seed bank: what was stored comes back exactly, small on disk, and a file that is not the one written is refused in one line."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors import SafetensorError

from nearpolicy.errors import CheckpointError
from nearpolicy.rollout import Rollout, StopReason
from nearpolicy.sources import bank as module
from nearpolicy.sources.bank import Header, SeedBank, bound_bytes, cut_short


def rollouts(lengths, *, entropy=True, seed=0):
    draw = np.random.default_rng(seed)
    stops = [StopReason.EOS, StopReason.LENGTH, StopReason.STOP_STRING]
    return [
        Rollout(
            prompt_id="p", group=0, sample=0, prompt_P=np.array([1]), response_T=draw.integers(0, 150_000, T), stop=stops[i % 3],
            logp_behavior_T=-draw.random(T).astype(np.float32), version_T=np.full(T, 7),
            entropy_T=draw.random(T).astype(np.float32) if entropy else None,
        )
        for i, T in enumerate(lengths)
    ]  # fmt: skip


def header(groups, seeds, **changes):
    return Header(**({"run": "abc", "version": 7, "first_ticket": 40, "groups": groups, "seeds": seeds} | changes))


def written(folder, lengths, groups, *, entropy=True, **changes):
    rows = rollouts(lengths, entropy=entropy)
    seeds = len(lengths) // groups
    half = groups // 2 * seeds
    chunks = [c for c in (rows[:half], rows[half:]) if c]
    return rows, SeedBank.write(folder, header(groups, seeds, **changes), chunks, entropy=entropy)


@given(st.integers(1, 4).flatmap(lambda s: st.lists(st.lists(st.integers(0, 9), min_size=s, max_size=s), min_size=1, max_size=5)), st.booleans())
def test_every_column_comes_back(tmp_path_factory, groups, entropy):
    rows, bank = written(tmp_path_factory.mktemp("bank"), [n for g in groups for n in g], len(groups), entropy=entropy)
    again = SeedBank(bank.path, run="abc", digest=bank.digest)
    got = [p for ticket in range(40, 40 + len(groups)) for p in again.group(ticket)]
    for prefix, row in zip(got, rows, strict=True):
        assert prefix.token_T.tolist() == row.response_T.tolist()
        assert prefix.logp_behavior_T.tobytes() == row.logp_behavior_T.tobytes()
        assert prefix.version_T.tolist() == [7] * len(row.response_T)
        assert prefix.stop is row.stop
        assert (prefix.entropy_T is None) == (not entropy)
        assert prefix.entropy_T is None or prefix.entropy_T.tobytes() == row.entropy_T.tobytes()


def test_tickets_of_the_cycle_are_in_it_and_others_are_not(tmp_path):
    _, bank = written(tmp_path, [3] * 8, 4)
    assert [t in bank for t in (39, 40, 43, 44)] == [False, True, True, False]


def test_at_most_sixteen_bytes_a_token(tmp_path):
    lengths = np.random.default_rng(0).integers(20, 60, 512).tolist()
    _, bank = written(tmp_path, lengths, 64)
    assert bank.num_tokens == sum(lengths)
    assert bank.num_bytes <= 16 * bank.num_tokens
    assert 12 * bank.num_tokens + 5 * 512 <= bank.num_bytes < 12 * bank.num_tokens + 5 * 512 + 1024
    assert bound_bytes(512, 60) >= 12 * bank.num_tokens + 5 * 512


def test_a_cut_seed_is_finished_only_when_kept_whole(tmp_path):
    _, bank = written(tmp_path, [5, 5], 1)
    seed = bank.group(40)[0]
    assert seed.stop is StopReason.EOS
    assert cut_short(seed, 5).stop is StopReason.EOS
    for kept in (0, 4):
        short = cut_short(seed, kept)
        assert short.stop is None
        assert [len(x) for x in (short.token_T, short.logp_behavior_T, short.version_T, short.entropy_T)] == [kept] * 4


def refused(path, says, run="abc", digest=None):
    with pytest.raises(CheckpointError, match=says) as error:
        SeedBank(path, run=run, digest=digest)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_truncated_damaged_missing_or_foreign_bank_is_refused(tmp_path):
    _, bank = written(tmp_path, [5] * 8, 4)
    whole = bank.path.read_bytes()
    refused(bank.path, "another run", run="other")
    for size in (0, 4, 200, len(whole) // 2, len(whole) - 1):
        bank.path.write_bytes(whole[:size])
        refused(bank.path, "expected a whole file")
        refused(bank.path, "truncated or damaged", digest=bank.digest)
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    bank.path.write_bytes(flipped)
    refused(bank.path, "truncated or damaged", digest=bank.digest)
    bank.path.write_bytes(b"not a bank")
    refused(bank.path, "expected a whole file")
    bank.path.unlink()
    refused(bank.path, "No such file")


def test_another_safetensors_file_is_no_bank(tmp_path):
    from safetensors.numpy import save_file

    save_file({"token_N": np.zeros(3, np.int32)}, tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", "expected a whole file")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "no space left"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), "Permission denied"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "no space left"),
    ],
)
def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch, error, says):
    def fails(arrays, path, **_):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(module, "save_file", fails)
    with pytest.raises(CheckpointError, match=says) as raised:
        written(tmp_path, [5] * 8, 4)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="seed bank"):
        written(tmp_path / "file" / "seeds", [5] * 8, 4)
