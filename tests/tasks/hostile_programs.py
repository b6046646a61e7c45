"""Programs that do what no program should, as data: source, and how each may end.

Those that try something print `held` when it failed and `ESCAPED` when it did not; `{...}` are filled in by the test.
"""

from typing import NamedTuple


class Hostile(NamedTuple):
    """One program that is run as a script."""

    source: str
    ends: tuple[str, ...] = ("ok",)
    says: str | None = "held"
    """Its output, stripped; None is any."""


def attempt(*lines: str, then: str = "print('ESCAPED')") -> str:
    """Try these lines; `held` when an OSError or ValueError stops them."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"import os, sys, signal, socket, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ntry:\n{body}\n    {then}\n" + (
        "except (OSError, ValueError):\n    print('held')\n"
    )


def syscall(name: str, *numbers: tuple[int, int], arguments: str) -> str:
    """A raw system call, by its number on (x86_64, aarch64); `held` when it fails."""
    ((x86, arm),) = numbers
    return (
        "import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"number = {x86} if platform.machine() == 'x86_64' else {arm}\n"
        f"print('held' if libc.syscall(number, {arguments}) < 0 else 'ESCAPED')  # {name}\n"
    )


SLOW = ("timeout",)
RUN: dict[str, Hostile] = {
    # processes
    "fork bomb": Hostile("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", SLOW, None),
    "thread bomb": Hostile(
        "import threading, time\nfor i in range(10_000):\n"
        "    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    except RuntimeError: break\nprint('held' if i < 40 else 'ESCAPED')"
    ),
    "ignores SIGTERM": Hostile(
        "import signal, time\nfor s in (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM): signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(60)", SLOW, "",
    ),
    "loop in C code": Hostile("10 ** 10 ** 9", SLOW, ""),
    "regular expression": Hostile("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", SLOW, ""),
    "daemon": Hostile(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\nprint('held')"
    ),
    "shell in the background": Hostile("import os\nos.system('(trap \"\" TERM; sleep 60) &')\nprint('held')"),
    "recursion": Hostile("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", ("failed", "died", "timeout"), ""),
    # memory
    "memory bomb": Hostile("x = []\nwhile True: x.append(b'x' * 10 ** 7)", ("failed", "died", "memory"), ""),
    "memory bomb of many": Hostile(
        "import os, time\nfor _ in range(12):\n    if os.fork() == 0: break\nx = b'x' * (90 * 2 ** 20)\ntime.sleep(60)", ("memory",), None
    ),
    "zip bomb": Hostile("import zlib\nbomb = zlib.compress(bytes(4 * 10 ** 6))\nx = [zlib.decompress(bomb) for _ in range(1000)]", ("failed",), ""),
    "huge integer": Hostile("1 << 2 ** 40", ("failed",), ""),
    "memory without a process (memfd)": Hostile(syscall("memfd_create", (319, 279), arguments="b'x', 0")),
    "memory without a process (shmget)": Hostile(syscall("shmget", (29, 194), arguments="0, 10 ** 8, 0o1600")),
    # output, files
    "endless output": Hostile("while True: print('x' * 10_000)", ("output",), None),
    "endless errors": Hostile("import sys\nwhile True: sys.stderr.write('x' * 10_000)", SLOW, ""),
    "one large file": Hostile("f = open('big', 'wb')\nwhile True: f.write(b'x' * 10 ** 6); f.flush()", ("failed", "died"), ""),
    "disk filling": Hostile(
        "import os\nwritten = 0\ntry:\n    for i in range(10_000):\n        with open(f'f{{i}}', 'wb') as f:\n            f.write(b'x' * 10 ** 6)\n"
        "        written += 1\nexcept OSError:\n    print('held' if written <= 4 else 'ESCAPED')"
    ),
    "files without end": Hostile("i = 0\nwhile True:\n    open(f'f{{i}}', 'w').close()\n    i += 1", ("files", "timeout"), None),
    "descriptors without end": Hostile(attempt("x = [os.dup(1) for _ in range(10_000)]")),
    # what is not its own
    "writes to a package": Hostile(attempt("open('/packages/numpy/__init__.py', 'a')")),
    "replaces a package": Hostile(attempt("os.rename('/packages/numpy', '/packages/old')")),
    "writes to the system": Hostile(attempt("open('/usr/lib/x', 'w')")),
    "writes to the interpreter": Hostile(attempt("open(os.path.join(os.path.dirname(os.__file__), 'os.py'), 'a')")),
    "makes a file outside /tmp": Hostile(attempt("open('/x', 'w')")),
    "reads a file of the machine": Hostile(attempt("open({secret_file!r}).read()")),
    "symbolic link out": Hostile(attempt("os.symlink({secret_file!r}, 'link')", "open('link').read()")),
    "hard link out": Hostile(attempt("os.link({secret_file!r}, 'link')", "open('link').read()")),
    "climbs out": Hostile(attempt("os.chdir('../../../../../..')", "open({secret_file!r}[1:]).read()")),
    "reads passwords": Hostile(attempt("open('/etc/passwd').read()")),
    "reads the home": Hostile(attempt("print(*os.listdir({home!r}))", "names = set(os.listdir({home!r})) - {interpreter!r}",
                                      then="print('ESCAPED' if names else 'held')"), says=None),
    "reads the environment": Hostile("import os\nprint('ESCAPED' if {secret!r} in str(dict(os.environ)) else 'held')"),
    "reads /proc": Hostile(attempt("open('/proc/1/environ').read()")),
    "reads /sys": Hostile(attempt("os.listdir('/sys')")),
    "reads the memory device": Hostile(attempt("open('/dev/mem', 'rb')")),
    # others
    "kills its parent": Hostile(
        "import os, signal\ntry:\n    os.kill(os.getppid(), signal.SIGKILL)\nexcept OSError:\n    pass\nprint('held')", ("ok", "died"), None
    ),
    "stops its parent": Hostile(
        "import os, signal\ntry:\n    os.kill(os.getppid(), signal.SIGSTOP)\nexcept OSError:\n    pass\nprint('held')", ("ok", "timeout"), None
    ),
    "kills everything": Hostile("import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('held')", ("ok", "died", "failed"), None),
    "kills the first process": Hostile(attempt("os.kill(1, signal.SIGKILL)", then="print('held')")),
    "traces its parent": Hostile(attempt("assert libc.ptrace(16, os.getppid(), 0, 0) == -1, 'traced'", then="print('held')")),
    "reads its parent's memory": Hostile(syscall("process_vm_readv", (310, 270), arguments="2, 0, 0, 0, 0, 0")),
    "network": Hostile(attempt("socket.create_connection(('1.1.1.1', 53), 0.5)")),
    "network of this machine": Hostile(attempt("socket.create_connection(('127.0.0.1', {port}), 0.5)")),
    "abstract socket of this machine": Hostile(attempt("socket.socket(socket.AF_UNIX).connect({abstract!r})")),
    # rights
    "becomes root": Hostile(attempt("os.setuid(0)", then="print('held' if os.getuid() and not os.access('/', os.W_OK) else 'ESCAPED')")),
    "another user": Hostile(attempt("os.setuid(1234)")),
    "raises its limits": Hostile(attempt("import resource", "resource.setrlimit(resource.RLIMIT_NPROC, (10 ** 6, 10 ** 6))")),
    "a namespace of its own": Hostile(syscall("unshare", (272, 97), arguments="0x10000000")),
    "clone into a namespace": Hostile(syscall("clone", (56, 220), arguments="0x10000011, 0, 0, 0, 0")),
    "clone3": Hostile(syscall("clone3", (435, 435), arguments="0, 0")),
    "mounts": Hostile(attempt("assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == -1, 'mounted'", then="print('held')")),
    "changes the root": Hostile(attempt("os.chroot('/tmp')")),
    "io_uring": Hostile(syscall("io_uring_setup", (425, 425), arguments="1, ctypes.create_string_buffer(256)")),
    "host name": Hostile(attempt("socket.sethostname('x')")),
    "the clock": Hostile(attempt("import time", "time.clock_settime(time.CLOCK_REALTIME, 0)")),
}  # fmt: skip
"""Run as scripts."""

FORGED = '{"end": "ok", "message": "", "output": null}'
CHECKED: dict[str, str] = {
    "prints the verdict": f"print({FORGED!r})\nprint('ok')\ndef answer(): print('passed'); return 41",
    "writes a verdict into every descriptor": f"""
import os, struct
data = {FORGED.encode()!r}
def answer():
    for fd in range(64):
        try: os.write(fd, struct.pack('>I', len(data)) + data)
        except OSError: pass
    return 41
""",
    "ends well while it is loaded": "import os\nos._exit(0)",
    "exits while it is loaded": "raise SystemExit(0)",
    "ends well when called": "import os\ndef answer(): os._exit(0)",
    "exits when called": "import sys\ndef answer(): sys.exit(0)",
    "equals everything": """
class All(int):
    def __eq__(self, other): return True
    def __hash__(self): return 42
    def __bool__(self): return True
def answer(): return All(41)
""",
    "an object that equals everything": """
class All:
    def __eq__(self, other): return True
    def __contains__(self, other): return True
def answer(): return All()
""",
    "patches builtins": """
import builtins, sys
builtins.AssertionError = type('AssertionError', (BaseException,), {})
builtins.__dict__['__build_class__'] = None
for name in ('exec', 'compile', 'isinstance', 'len', 'callable'): setattr(builtins, name, lambda *a, **k: True)
def answer(): return 41
""",
    "defines what the tests use": "def abs(x): return 0\ndef isinstance(*a): return True\ndef check(candidate): pass\ndef answer(): return 41",
    "looks for the tests": """
import gc, sys
def answer():
    found = [o for o in gc.get_objects() if isinstance(o, (str, dict)) and 'assert answ' + 'er()' in str(o)]
    frame = sys._getframe()
    while frame:
        found += [v for v in frame.f_locals.values() if isinstance(v, str) and 'assert answ' + 'er()' in v]
        frame = frame.f_back
    return 42 if found else 41
""",
    "kills the judge": """
import os, signal
def answer():
    for pid in range(3, 200):
        if pid != os.getpid():
            try: os.kill(pid, signal.SIGKILL)
            except OSError: pass
    return 41
""",
    "interrupts the judge": """
import os, signal
def answer():
    for pid in range(3, 200):
        if pid != os.getpid():
            try: os.kill(pid, signal.SIGINT)
            except OSError: pass
    return 41
""",
    "a verdict at exit": f"import atexit, os\natexit.register(lambda: os.write(1, {FORGED.encode()!r}))\ndef answer(): return 41",
    "never returns": "def answer():\n    while True: pass",
    "returns without end": "def answer():\n    import itertools\n    return itertools.count()",
    "returns too much": "def answer(): return 'x' * 10 ** 8",
    "returns what is nested too deep": "def answer():\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x",
    "returns itself": "def answer():\n    x = []\n    x.append(x)\n    return x",
    "raises what cannot be read": "class E(Exception):\n    def __str__(self): raise E\ndef answer(): raise E",
    "garbage in the pipe": """
import os
def answer():
    for fd in range(3, 64):
        try: os.write(fd, b'\\0\\0\\0\\5junk!' * 100)
        except OSError: pass
    return 41
""",
}
"""Each wants `assert answer() == 42` to pass without being right."""
