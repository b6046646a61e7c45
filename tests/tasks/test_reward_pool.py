"""Whatever a reward function does, every item has one of four outcomes and the pool stays healthy."""

import _thread
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.protocols import ScoreItem
from nearpolicy.rollout import Outcome
from nearpolicy.tasks.functions import Reward, RewardSpec
from nearpolicy.tasks.pool import MAX_CHUNK, RewardPool

HOSTILE = str(Path(__file__).with_name("hostile.py"))
DEADLINE_S = 1.0


def item(completion: object, prompt: object = "p", **columns: object) -> ScoreItem:
    return ScoreItem(prompt=prompt, completion=str(completion), columns=columns)


def act(**options: object) -> RewardSpec:
    return RewardSpec.single(f"{HOSTILE}:act", **options)


@pytest.fixture(scope="module")
def pool():
    with RewardPool(act(), workers=1, deadline_s=DEADLINE_S, memory_mb=512) as pool:
        yield pool


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


BAD = [
    ("raise", "ValueError: on purpose"),
    ("unreadable", "_Unreadable"),
    ("interrupt", "KeyboardInterrupt"),
    ("sys.exit", "SystemExit"),
    ("nan", "returned nan"),
    ("inf", "returned inf"),
    ("huge", "returned 1e+300, which is beyond float32"),
    ("two", "returned 2 values for 1 completion"),
    ("empty", "returned 0 values for 1 completion"),
    ("scalar", "returned a float, not a list"),
    ("text", "returned a str, not a number"),
    ("dict", "returned a dict, not a list"),
    ("nothing", "returned a NoneType, not a list"),
    ("unpicklable", "TypeError"),
    ("recursion", "RecursionError"),
    ("memory", "MemoryError"),
]


def test_bad_values_are_errors_with_one_line_and_cost_no_worker(pool):
    restarts = pool.restarts
    scores = pool.score([item(name) for name, _ in BAD] + [item("0.25"), item("none")])
    for (name, message), score in zip(BAD, scores, strict=False):
        assert score.outcome is Outcome.ERROR, name
        assert math.isnan(score.reward)
        assert score.message.startswith("act: ")
        assert message in score.message
        assert "\n" not in score.message
        assert len(score.message) < 320
    assert (scores[-2].outcome, scores[-2].reward, scores[-2].parts) == (Outcome.SCORE, 0.25, {"act": 0.25})
    assert scores[-1].outcome is Outcome.ABSTAIN
    assert math.isnan(scores[-1].reward)
    assert pool.restarts == restarts


@pytest.mark.parametrize("name", ["power", "regex", "sleep", "sigterm", "print"])
def test_a_hang_is_a_timeout_at_its_deadline(pool, name):
    restarts = pool.restarts
    begun = time.monotonic()
    before, hung, after = pool.score([item(0.1), item(name), item(0.2)])
    assert hung.outcome is Outcome.TIMEOUT
    assert math.isnan(hung.reward)
    assert hung.message == f"no result within {DEADLINE_S:g} s"
    assert (before.reward, after.reward) == (0.1, 0.2)
    assert pool.restarts == restarts + 1
    assert time.monotonic() - begun < DEADLINE_S + 3  # far from the seconds that a polite kill waits


@pytest.mark.parametrize(
    ("name", "message"), [("exit", "exit code 3"), ("segfault", "SIGSEGV"), ("close", "closed its connection"), ("junk", "wrote to its connection")]
)
def test_a_dead_worker_is_an_error_of_the_item_that_killed_it(pool, name, message):
    before, dead, after = pool.score([item(0.1), item(name), item(0.2)])
    assert dead.outcome is Outcome.ERROR
    assert message in dead.message
    assert (before.reward, after.reward) == (0.1, 0.2)


def test_output_is_dropped_and_workers_do_not_import_torch(pool, capfd):
    assert [s.reward for s in pool.score([item("hello"), item("torch")])] == [0.5, 0.0]
    assert capfd.readouterr() == ("", "")


def test_an_alarm_of_one_item_does_not_hit_the_next(pool):
    restarts = pool.restarts
    assert [s.reward for s in pool.score([item("alarm"), item("pause"), item("alarm"), item("pause")])] == [1.0] * 4
    assert pool.restarts == restarts


def test_what_a_worker_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTILE_CHILD", str(tmp_path / "pid"))
    with RewardPool(act(), workers=1, deadline_s=DEADLINE_S) as pool:
        (score,) = pool.score([item("fork")])
    assert score.outcome is Outcome.TIMEOUT
    assert wait_until(lambda: gone(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("name", ["plain", "bare", "daemon", "plain_hang", "plain_exit"])
def test_what_a_worker_started_in_a_session_of_its_own_ends_with_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOSTILE_CHILD", str(tmp_path / "pid"))
    with RewardPool(act(), workers=1, deadline_s=DEADLINE_S) as pool:
        (score,) = pool.score([item(name)])
        child = int((tmp_path / "pid").read_text())
        assert score.outcome is {"plain_hang": Outcome.TIMEOUT, "plain_exit": Outcome.ERROR}.get(name, Outcome.SCORE)
        assert score.outcome is not Outcome.SCORE or not gone(child)
    assert wait_until(lambda: gone(child))


def test_a_weighted_sum_beyond_float32_is_an_error():
    spec = RewardSpec((Reward(function=f"{HOSTILE}:act", weight=-10.0),))
    with RewardPool(spec, workers=1, deadline_s=5) as pool:
        large, fine = pool.score([item("large"), item(1)])
    assert large.outcome is Outcome.ERROR
    assert "the weighted sum is -3e+39, which is beyond float32" in large.message
    assert fine.reward == -10.0


def test_nothing_is_lost_or_scored_twice_when_workers_are_killed(tmp_path):
    log = tmp_path / "log"
    names = [str(k) for k in range(150)]
    for place, name in ((3, "sleep a"), (40, "exit b"), (41, "sleep c"), (120, "segfault d")):
        names[place] = name
    with RewardPool(act(log=str(log)), workers=2, deadline_s=DEADLINE_S) as pool:
        scores = pool.score([item(name) for name in names])
        assert pool.restarts == 4
        assert pool.counts == {Outcome.SCORE: 146, Outcome.TIMEOUT: 2, Outcome.ERROR: 2}
    assert [s.reward for s, n in zip(scores, names, strict=True) if n.isdigit()] == [float(n) for n in names if n.isdigit()]
    assert [scores[k].outcome for k in (3, 40, 41, 120)] == [Outcome.TIMEOUT, Outcome.ERROR, Outcome.TIMEOUT, Outcome.ERROR]
    assert sorted(log.read_text().splitlines()) == sorted(names)


def test_the_deadline_is_each_samples_own(pool):
    """Four items of 0.2 s take longer than the deadline together; none of them does alone."""
    assert [s.outcome for s in pool.score([item("pause")] * 4)] == [Outcome.SCORE] * 4


def test_a_worker_that_dies_between_calls_costs_no_item(pool):
    (pid,) = [int(s.reward) for s in pool.score([item("pid")])]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: gone(pid))
    assert [s.reward for s in pool.score([item(k) for k in range(5)])] == [0, 1, 2, 3, 4]


def test_more_items_than_a_chunk_keep_their_order(pool):
    count = 5 * MAX_CHUNK + 3
    assert [s.reward for s in pool.score([item(k) for k in range(count)])] == list(range(count))
    assert pool.score([]) == []


def test_what_cannot_be_sent_is_an_error_of_its_own(pool):
    bad, good = pool.score([item(1, thing=threading.Lock()), item(2)])
    assert bad.outcome is Outcome.ERROR
    assert "cannot be sent" in bad.message
    assert good.reward == 2.0


def test_several_rewards_are_a_weighted_sum_over_those_that_did_not_abstain():
    spec = RewardSpec((Reward(function=f"{HOSTILE}:half", weight=2.0), Reward(function=f"{HOSTILE}:only_odd", name="odd", weight=-3.0)))
    with RewardPool(spec, workers=1, deadline_s=5) as pool:
        odd, even, bad = pool.score([item(3), item(4), item("x")])
    assert (odd.reward, dict(odd.parts)) == (2 * 0.5 - 3.0, {"half": 0.5, "odd": 1.0})
    assert (even.reward, even.outcome) == (1.0, Outcome.SCORE)
    assert even.parts["half"] == 0.5
    assert math.isnan(even.parts["odd"])
    assert bad.outcome is Outcome.ERROR
    assert bad.message.startswith("odd: ValueError")
    assert dict(bad.parts) == {"half": 0.5}


def test_all_functions_abstaining_is_an_abstention():
    with RewardPool(RewardSpec.single(f"{HOSTILE}:only_odd"), workers=1, deadline_s=5) as pool:
        none, one = pool.score([item(2), item(1)])
    assert (none.outcome, none.message) == (Outcome.ABSTAIN, "all reward functions abstained")
    assert (one.outcome, one.message) == (Outcome.SCORE, "")


def test_arguments_arrive_as_trl_hands_them_over():
    with RewardPool(RewardSpec.single(f"{HOSTILE}:seen", bonus=2), workers=1, deadline_s=5) as pool:
        messages = [{"role": "user", "content": "p"}]
        (score,) = pool.score(
            [ScoreItem(prompt=messages, completion="hi", columns={"answer": "7", "metadata": {"a": [1]}, "level": 3, "prompt": "ours", "bonus": 9})]
        )
    assert (score.message, score.reward) == ("", 2.0)


def test_interrupt_is_passed_on_and_the_pool_stays_usable(pool):
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.score([item("sleep"), item(1)])
    timer.join()
    assert [s.reward for s in pool.score([item(5), item(6)])] == [5.0, 6.0]


def test_close_is_idempotent_and_leaves_no_process():
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = RewardPool(act(), workers=2, deadline_s=5)
    assert pool.score([item("exit")])[0].outcome is Outcome.ERROR
    pids = {int(s.reward) for s in pool.score([item("pid")] * 8)}
    pool.close()
    pool.close()
    assert all(map(gone, pids))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (late,) = pool.score([item(1)])
    assert late.outcome is Outcome.ERROR
    assert "closed" in late.message


def test_close_from_another_thread_ends_a_call(pool):
    with RewardPool(act(), workers=1, deadline_s=DEADLINE_S) as other:
        timer = threading.Timer(0.1, other.close)
        timer.start()
        scores = other.score([item("sleep")] * 50)
        timer.join()
    assert len(scores) == 50
    assert {s.outcome for s in scores} <= {Outcome.TIMEOUT, Outcome.ERROR}
    assert scores[-1].outcome is Outcome.ERROR


def forked(child) -> int:
    """Pid of a forked copy of this process that runs `child` and ends without cleaning up."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return pid


@pytest.mark.parametrize(
    ("end", "name", "from_thread"), [(signal.SIGINT, "power", False), (signal.SIGKILL, "power", False), (signal.SIGKILL, "blocked", True)]
)
def test_no_orphans_when_the_parent_goes(end, name, from_thread, tmp_path):
    """Ctrl-C, or an end nobody can handle, while the worker is in C code that never returns or blocks every signal.

    A worker started by a thread that has ended lives on until then.
    """
    note = tmp_path / "pid"

    def owner():
        pools = []

        def start():
            pools.append(RewardPool(act(), workers=1, deadline_s=60))

        if from_thread:
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
        else:
            start()
        (tmp_path / "part").write_text(str(int(pools[0].score([item("pid")])[0].reward)))
        (tmp_path / "part").rename(note)
        pools[0].score([item(name)])

    parent = forked(owner)
    assert wait_until(note.exists)
    worker = int(note.read_text())
    time.sleep(0.2)
    assert not gone(worker)
    os.kill(parent, end)
    os.waitpid(parent, 0)
    assert wait_until(lambda: gone(worker))


def test_a_fork_of_the_parent_leaves_the_workers_alone(pool):
    restarts = pool.restarts
    os.waitpid(forked(pool._finalizer.__call__), 0)
    assert pool.score([item(1)])[0].reward == 1.0
    assert pool.restarts == restarts


def test_a_memory_hog_gets_a_memory_error():
    with RewardPool(act(), workers=1, deadline_s=20, memory_mb=192) as pool:
        hog, fine = pool.score([item("hog"), item(1)])
    assert "MemoryError" in hog.message
    assert fine.reward == 1.0


def test_a_function_that_fails_after_the_check_is_a_usage_error_at_start(tmp_path):
    """The check has a process of its own; each worker imports afresh."""
    (tmp_path / "here.py").write_text(
        "import os\nif os.path.exists(__file__ + '.seen'): raise RuntimeError('only once')\n"
        "open(__file__ + '.seen', 'w').close()\ndef f(completions): return [1]\n"
    )
    spec = RewardSpec.single(f"{tmp_path}/here.py:f")
    spec.functions()
    with pytest.raises(UsageError, match=r"here\.py:f': got RuntimeError: only once while importing"):
        RewardPool(spec, workers=1, deadline_s=1, memory_mb=None)


@pytest.mark.parametrize(("body", "said"), [("time.sleep(60)", r"did not import within 0\.5 s"), ("os._exit(7)", "exit code 7")])
def test_a_module_that_hangs_or_exits_is_a_usage_error(tmp_path, body, said):
    (tmp_path / "bad.py").write_text(f"import os, time\n{body}\ndef f(completions): return [1]\n")
    with pytest.raises(UsageError, match=said):
        RewardPool(RewardSpec.single(f"{tmp_path}/bad.py:f"), workers=2, deadline_s=1, start_timeout_s=0.5 if "sleep" in body else 20)


def test_a_process_that_cannot_be_started_is_an_engine_error(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: (_ for _ in ()).throw(BlockingIOError(11, "Resource temporarily unavailable")))
    with pytest.raises(EngineError, match="temporarily unavailable"):
        RewardPool(RewardSpec.single("number"), workers=1, deadline_s=1)


def test_when_replacements_fail_to_start_the_rest_are_errors_and_the_next_call_tries_again(tmp_path):
    file = tmp_path / "fickle.py"
    file.write_text("import os\nif os.path.exists(__file__ + '.broken'): raise RuntimeError('broken now')\n"
                    "def f(completions): return [os._exit(1) if completions[0] == 'die' else 1.0]\n")  # fmt: skip
    with RewardPool(RewardSpec.single(f"{file}:f"), workers=1, deadline_s=5) as pool:
        broken = tmp_path / "fickle.py.broken"
        broken.touch()
        scores = pool.score([item("a"), item("die"), item("b"), item("c")])
        assert [s.outcome for s in scores] == [Outcome.SCORE, Outcome.ERROR, Outcome.ERROR, Outcome.ERROR]
        assert "no worker starts" in scores[-1].message
        assert "broken now" in scores[-1].message
        broken.unlink()
        assert [s.reward for s in pool.score([item("b"), item("c")])] == [1.0, 1.0]


@pytest.mark.parametrize(("workers", "deadline_s"), [(0, 1.0), (1, 0.0), (1, math.nan), (1, math.inf)])
def test_bounds(workers, deadline_s):
    with pytest.raises(UsageError):
        RewardPool(act(), workers=workers, deadline_s=deadline_s)
