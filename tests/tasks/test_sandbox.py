"""What a model writes stays inside, and what the sandbox says of it cannot be forged."""

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hostile_programs import CHECKED, RUN

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.tasks import sandbox
from nearpolicy.tasks.sandbox import Limits, Ran, Session, Strange, unavailable
from nearpolicy.tasks.syscalls import MACHINES, seccomp_filter

walls = pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox: {unavailable()}")
LIMITS = Limits(timeout=0.6, memory_mb=128, output_kb=64, file_mb=4, processes=16)
PATIENT = dataclasses.replace(LIMITS, timeout=15)
"""For what ends by itself, however busy the machine."""
SECRET = "the-secret-of-this-test"
# Beside a step's time: a start, and an end of everything.
MOST_S = 6


def left_over() -> set[int]:
    """Processes of sandboxes: forks keep the command line of the supervisor, programs under root keep their user."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line, user = (entry / "cmdline").read_bytes(), entry.stat().st_uid
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if state not in b"ZX" and (b"marshal.loads" in line or user >= sandbox._FIRST_USER):
            found.add(int(entry.name))
    return found


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def soon(condition) -> bool:
    """True within two seconds: the kernel takes a moment over what it was told to end."""
    due = time.monotonic() + 2
    while not condition() and time.monotonic() < due:
        time.sleep(0.005)
    return bool(condition())


def tree_of(session: Session) -> list[int]:
    return [pid for pid in sandbox._tree(session._process.pid) if not gone(pid)]


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What programs must not reach: a file, a variable, a server, an abstract socket; and what they are told to look for."""
    secret_file = tmp_path_factory.mktemp("secrets") / "key"
    secret_file.write_text(SECRET)
    abstract = f"\0nearpolicy-{os.getpid()}"
    os.environ["NEARPOLICY_TEST_SECRET"] = SECRET
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        server.setblocking(False)
        local.setblocking(False)
        # Folders on the way to the interpreter are there, with nothing else in them.
        home = str(Path.home())
        parts = Path(sys.base_prefix).relative_to(home).parts[:1] if Path(sys.base_prefix).is_relative_to(home) else ()
        yield {"secret_file": str(secret_file), "secret": SECRET, "port": server.getsockname()[1], "abstract": abstract, "home": home,
               "interpreter": set(parts), "listening": (server, local)}  # fmt: skip
    del os.environ["NEARPOLICY_TEST_SECRET"]


@walls
@pytest.mark.parametrize("name", list(RUN))
def test_hostile_scripts_are_contained(name, outside):
    hostile = RUN[name]
    before, begun = left_over(), time.monotonic()
    source = hostile.source
    for key in ("secret_file", "secret", "port", "abstract", "home", "interpreter"):
        source = source.replace(f"{{{key}!r}}", repr(outside[key])).replace(f"{{{key}}}", str(outside[key]))
    source = source.replace("{{", "{").replace("}}", "}")
    limits = LIMITS if "timeout" in hostile.ends else PATIENT
    with Session(source, limits) as session:
        done = session.run("")
        inside = tree_of(session) if session._open else []
    assert done.end in hostile.ends, done
    assert "ESCAPED" not in str(done.output)
    assert SECRET not in str(done.output)
    if done.end == "ok" and hostile.says is not None:
        assert done.output.strip() == hostile.says
    assert time.monotonic() - begun < limits.timeout + MOST_S
    assert soon(lambda: all(map(gone, inside)))
    assert soon(lambda: left_over() <= before)
    for server in outside["listening"]:
        with pytest.raises(BlockingIOError):
            server.accept()
    assert Path(outside["secret_file"]).read_text() == SECRET


@walls
@pytest.mark.parametrize("name", list(CHECKED))
def test_no_program_talks_a_test_into_passing(name):
    with Session(CHECKED[name], LIMITS) as session:
        done = session.check("assert abs(answer()) == 42 and isinstance(42, int)\nassert answer() == 42", entry="answer")
        assert done.end in ("failed", "died", "timeout", "output"), done
        again = session.check("assert answer() == 42")
        assert again.end in ("failed", "died", "timeout", "output"), again
    with Session("def answer(): return 42", LIMITS) as session:
        assert session.check("assert answer() == 42") == Ran("ok", None)


@walls
def test_the_suite_is_as_long_as_it_says():
    assert len(RUN) + len(CHECKED) >= 25


@walls
def test_what_a_step_leaves_behind_is_gone_before_the_next():
    source = "import os, time\nprint(os.path.exists('mark'))\nopen('mark', 'w').close()\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n"
    with Session(source, LIMITS) as session:
        few = len(tree_of(session))
        assert session.run("").output == "False\n"
        assert soon(lambda: len(tree_of(session)) == few)
        assert session.run("").output == "True\n"  # one program's files are its own
    with Session(source, LIMITS) as session:
        assert session.run("").output == "False\n"


@walls
def test_the_session_survives_a_step_beyond_its_limits():
    source = "import sys\nword = input()\nwhile word == 'loop': pass\nprint(word * (10 ** 6 if word == 'much' else 1))"
    with Session(source, LIMITS) as session:
        ends = [session.run(word).end for word in ("a", "loop", "b", "much", "c", "")]
    assert ends == ["ok", "timeout", "ok", "output", "ok", "failed"]


@walls
def test_steps_after_the_end():
    session = Session("print(1)", LIMITS)
    session.close()
    session.close()
    assert session.run("") == Ran("died", message="the sandbox is closed")


@walls
def test_scripts():
    source = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nprint(__name__, sys.argv)"
    with Session(source, LIMITS) as session:
        assert session.run("1 2 3") == Ran("ok", "6\n__main__ ['solution.py']\n")
        assert session.run("1 x").end == "failed"
        long = " ".join(map(str, range(50_000)))  # more than a pipe holds
        assert session.run(long).output.startswith(f"{sum(range(50_000))}\n")


@walls
@pytest.mark.parametrize(
    ("source", "ran"),
    [
        ("raise SystemExit", Ran("ok", "")),
        ("import sys; print('x'); sys.exit('no')", Ran("failed", "x\n", "exit code 1")),
        ("import os; os._exit(3)", Ran("failed", "", "exit code 3")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Ran("died", "", "SIGSEGV")),
        ("this is no program", Ran("failed", "", "exit code 1")),
        ("a\0b", Ran("failed", "", "exit code 1")),
        ("import atexit; atexit.register(print, 'last')", Ran("ok", "last\n")),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()", Ran("ok", "late\n")),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", Ran("ok", "\ufffd")),
        ("import os; os.close(1)", Ran("ok", "")),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nprint(A())", Ran("ok", "A(x=1)\n")),
        ("import numpy\nprint(numpy.arange(3).sum())", Ran("ok", "3\n")),
        ("import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)", Ran("ok", "hi\n\n")),
        ("from multiprocessing import Pool\nwith Pool(2) as p: print(p.map(abs, [-1, 2]))", Ran("ok", "[1, 2]\n")),
        ("import torch", Ran("failed", "", "exit code 1")),
    ],
)  # fmt: skip
def test_how_scripts_end(source, ran):
    with Session(source, Limits(timeout=5)) as session:
        assert session.run("") == ran


PLAIN = [
    None, True, 0, -(2**70), 10**5000, 1.5, float("inf"), "text \ud800 \0", b"\xff", [1, [2.0]], (1, ("a",)), {1, 2}, frozenset({(1, 2)}),
    {"a": 1, (1, 2): [None], 3: {}}, 1 + 2j, range(1, 9, 2),
]  # fmt: skip


@walls
def test_values_come_and_go_as_they_are():
    with Session("def same(x): return x\nvalue = 7\nclass Solution:\n    def twice(self, x): return 2 * x", Limits()) as session:
        for value in PLAIN:
            done = session.call("same", [value])
            assert done.end == "ok"
            assert done.output == value
            assert type(done.output) is type(value)
        assert session.call("twice", [3]) == Ran("ok", 6)
        assert session.call("value", []) == Ran("failed", message="value is no function")
        assert session.call("none", []) == Ran("failed", message="NameError: name 'none' is not defined")
        assert session.call("same", []).message.startswith("TypeError: same() missing 1")
        with pytest.raises(TypeError, match="a function"):
            session.call("same", [lambda: 0])


@walls
def test_rarer_values():
    source = """
import datetime, decimal, fractions, collections, enum
import numpy as np
class E(enum.IntEnum):
    A = 5
class C: pass
T = collections.namedtuple("T", "x y")
def f(kind):
    return {"decimal": decimal.Decimal("1.10"), "fraction": fractions.Fraction(2, 4), "date": datetime.date(2024, 2, 29),
            "datetime": datetime.datetime(2024, 1, 1, 12), "enum": E.A, "tuple": T(1, 2), "counter": collections.Counter("aab"),
            "array": np.eye(2), "scalar": np.int64(3), "generator": (i for i in range(3)), "keys": {1: 2}.keys(), "object": C(), "class": C,
            "nan": float("nan")}[kind]
"""
    import datetime
    import decimal
    import fractions

    wanted = {
        "decimal": decimal.Decimal("1.10"), "fraction": fractions.Fraction(1, 2), "date": datetime.date(2024, 2, 29),
        "datetime": datetime.datetime(2024, 1, 1, 12), "enum": 5, "tuple": (1, 2), "counter": {"a": 2, "b": 1}, "array": [[1, 0], [0, 1]],
        "scalar": 3,
    }  # fmt: skip
    with Session(source, Limits()) as session:
        assert {kind: session.call("f", [kind]).output for kind in wanted} == wanted
        assert list(session.call("f", ["generator"]).output) == [0, 1, 2]
        assert isinstance(session.call("f", ["object"]).output, Strange)
        assert session.call("f", ["class"]).output != 3
        assert session.call("f", ["nan"]).output != session.call("f", ["nan"]).output


@walls
@pytest.mark.parametrize(
    ("tests", "entry", "end", "said"),
    [
        ("assert f(1) == 2", None, "ok", ""),
        ("assert f(1) == 3", None, "failed", "AssertionError"),
        ("assert f(1) == 3, 'not three'", "f", "failed", "AssertionError: not three"),
        ("def check(candidate):\n    assert candidate(1) == 2", "f", "ok", ""),
        ("def check(candidate):\n    assert candidate(1) == 1", "f", "failed", "AssertionError"),
        ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", "f", "ok", ""),
        ("assert math.isclose(f(1), 2.0)", None, "ok", ""),  # a module the tests forgot to import
        ("import numpy as np\nassert np.allclose(f(np.float64(1)), 2)", "f", "ok", ""),
        ("try:\n    f('x')\nexcept TypeError:\n    pass\nelse:\n    assert False", "f", "ok", ""),
        ("try:\n    f(None)\nexcept KeyError:\n    pass", "f", "failed", "TypeError"),
        ("v = [3, 1]\ng(v)\nassert v == [1, 3]", None, "ok", ""),
        ("s = S(2)\ns.add(3)\nassert s.total == 5 and len(s) == 5 and list(s) == [0, 1] and s[4] == 4 and str(s) == 'S'", "S", "ok", ""),
        ("assert S(1) == S(1)", "S", "failed", "AssertionError"),  # equality is not the program's to say
        ("assert h(1) == 1", None, "failed", "NameError"),
        ("assert 1 == 1", None, "tests", "they never call the program"),
        ("assert f(lambda x: x)", "f", "tests", "they hand over a function as an argument"),
        ("import no_such_module\nassert f(1) == 2", "f", "tests", "ModuleNotFoundError"),
        ("assert i(1)", "i", "failed", "ModuleNotFoundError"),  # the program's own
        ("assert f(1) ==", "f", "tests", "SyntaxError"),
        ("import sys\nsys.exit(0)\nassert f(1) == 2", "f", "failed", "SystemExit"),
        ("import os\nos._exit(0)", "f", "died", "the tests ended before their last line"),
        ("while True: f(1)", "f", "timeout", "out of time"),
    ],
)
def test_checks(tests, entry, end, said):
    source = """
def f(x): return x + 1
def g(v): v.sort()
def i(x): import no_such_module
class S:
    def __init__(self, x): self.total = x
    def add(self, x): self.total += x
    def __eq__(self, other): return True
    def __len__(self): return self.total
    def __iter__(self): return iter([0, 1])
    def __getitem__(self, i): return i
    def __str__(self): return "S"
"""
    with Session(source, Limits(timeout=2 if end != "timeout" else 0.3)) as session:
        done = session.check(tests, entry=entry)
    assert done.end == end, done
    assert said in done.message
    assert "\n" not in done.message


@walls
def test_helpers_of_the_prompt_are_the_prompts_own():
    prelude = "def helper(x):\n    return x * 10\n\ndef f(x):\n    '''Doubles.'''\n"
    tests = "def check(candidate):\n    assert candidate(2) == helper(2) / 5"
    with Session("def f(x): return 2 * x", Limits()) as session:
        assert session.check(tests, entry="f", prelude=prelude).end == "ok"
    with Session("def helper(x): return 0\ndef f(x): return 0", Limits()) as session:
        assert session.check(tests, entry="f", prelude=prelude).end == "failed"


@walls
def test_several_at_a_time_keep_apart():
    out = {}

    def work(k):
        with Session(f"print(input() + '{k}')", Limits()) as session:
            out[k] = [session.run(str(i)).output for i in range(3)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == {k: [f"{i}{k}\n" for i in range(3)] for k in range(4)}


def test_without_walls_only_when_asked_for():
    with Session("if __name__ == '__main__': print(input())\ndef f(x): return x + 1", LIMITS, unsandboxed=True) as session:
        assert session.run("7") == Ran("ok", "7\n")
        assert session.call("f", [1]) == Ran("ok", 2)
        assert session.check("assert f(1) == 2").end == "ok"
    with Session("import os, time\nif os.fork() == 0: time.sleep(60)\nwhile True: pass", LIMITS, unsandboxed=True) as session:
        assert session.run("").end == "timeout"
        inside = tree_of(session)
    assert soon(lambda: all(map(gone, inside)))


def test_a_machine_without_bubblewrap_is_refused_with_the_reason_and_the_way_out(nowhere):
    assert sandbox.unavailable() == "no program bwrap"
    with pytest.raises(UsageError, match=r"got no program bwrap; .*apt-get install bubblewrap.* allow_unsandboxed = true"):
        sandbox.require()
    sandbox.require(unsandboxed=True)


def test_a_sandbox_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr(sandbox, "_walls", lambda *_, **__: ["/bin/sh", "-c", "echo no permission >&2; exit 1"])
    with pytest.raises(EngineError, match="no permission"):
        Session("print(1)")


@pytest.mark.parametrize(
    "wrong", [{"timeout": 0}, {"timeout": True}, {"memory_mb": 1}, {"memory_mb": 100.5}, {"processes": 0}, {"output_kb": "8"}, {"file_mb": [1]}]
)
def test_limits_out_of_range(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Limits(**wrong)


def decide(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What a seccomp program returns: an interpreter of the few instructions it uses."""
    import struct

    code = list(struct.iter_unpack("<HBBI", program))
    data, at, value = {0: number, 4: architecture, 16: argument}, 0, 0
    while True:
        kind, yes, no, k = code[at]
        at += 1
        if kind == 0x20:
            value = data[k]
        elif kind == 0x06:
            return k
        else:
            at += yes if {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind] else no


@pytest.mark.parametrize("machine", list(MACHINES))
def test_the_filter_refuses_what_it_names_and_nothing_else(machine):
    architecture, numbers = MACHINES[machine]
    program = seccomp_filter(machine)
    assert len(program) % 8 == 0
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    refused = {n for name, n in numbers.items() if name != "clone"} | {*range(425, 434), 438, 442, 443, 447}
    for number in range(512):
        want = 0x00050026 if number == 435 else refuse if number in refused else allow
        assert decide(program, architecture, number) == want, number
    clone = numbers["clone"]
    assert decide(program, architecture, clone, 0x01200011) == allow  # fork
    assert decide(program, architecture, clone, 0x003D0F00) == allow  # a thread
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, architecture, clone, flag | 17) == refuse
    assert decide(program, architecture, 0x40000000 | 57) == refuse  # the x32 table
    assert decide(program, 0x40000003, 0) == kill  # i386


def test_other_machines_have_no_filter():
    assert seccomp_filter("riscv64") is None


def test_the_tree_of_a_process_that_has_ended_is_the_process_alone():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert sandbox._tree(ended.pid) == [ended.pid]
