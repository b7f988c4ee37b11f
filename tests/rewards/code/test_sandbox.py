"""What untrusted programs try, and what becomes of it. Most tests run with namespaces and without."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grupo.errors import ConfigError
from grupo.rewards.code.sandbox import runner as sandbox
from grupo.rewards.code.sandbox.runner import Call, Isolation, Limits, SandboxJob, isolation, map_in_threads, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and namespaces of Linux")

BEST, PLAIN = "namespaces", "plain"
QUICK = Limits(seconds=3.0)


@pytest.fixture(params=[BEST, PLAIN])
def within(request) -> Isolation:
    if request.param == BEST:
        if not isolation().namespaces:
            pytest.skip(f"{isolation()}")
        return isolation()
    return Isolation(False, False, "asked for")


@pytest.fixture
def namespaces() -> Isolation:
    if not isolation().namespaces:
        pytest.skip(f"{isolation()}")
    return isolation()


def processes() -> dict[int, str]:
    """Running processes and their command lines."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def marked(mark: str) -> list[int]:
    return [pid for pid, command in processes().items() if mark in command and pid != os.getpid()]


def own_children() -> set[int]:
    return {int(word) for word in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}


def test_output_input_and_exit_code(within):
    source = "print(input()[::-1]); import sys; print('no', file=sys.stderr); exit(3)"
    run = run_python(SandboxJob(source, "abc\n"), within=within)
    assert (run.ended, run.exit_code, run.stdout, run.stderr) == ("exit", 3, "cba\n", "no\n")
    assert 0 < run.seconds < 5
    run = run_python("import sys\nprint(repr(sys.stdin.read()))\ninput()", within=within)
    assert run.stdout == "''\n" and run.error == "EOFError"


def test_values_of_calls_come_back_as_they_are(within):
    source = "def f(x, *, y): return {('a', 1): [x, y, 2**100, {3}, 1.5, None, True, b'z', 'é', 2j]}"
    run = run_python(
        SandboxJob(source, calls=(Call("f", (-(2**70),), {"y": b"q"}), Call("f(1, y=2)[('a', 1)][1]"))), within=within
    )
    assert run.finished
    assert run.values == ({("a", 1): [-(2**70), b"q", 2**100, {3}, 1.5, None, True, b"z", "é", 2j]}, 2)
    assert type(run.values[0]["a", 1][6]) is bool


def test_a_program_is_main_only_where_nothing_is_asked_of_it():
    source = "if __name__ == '__main__': print('main')\ndef f(): return __name__"
    assert run_python(source).stdout == "main\n"
    run = run_python(SandboxJob(source, calls=(Call("f", ()),)))
    assert run.stdout == "" and run.values == ("program",)


def test_errors_are_named():
    for source, error in [
        ("def f(:", "NotPython"),
        ("eval('1 +')", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("'\ud800'.encode()", "UnicodeEncodeError"),
        ("class Odd(BaseException): pass\nraise Odd", "Odd"),
    ]:
        run = run_python(source)
        assert (run.ended, run.exit_code, run.error) == ("exit", 1, error)
        assert "in main" not in run.stderr


def test_only_the_standard_library_is_there_unless_allowed():
    source = "import yaml; print(yaml.safe_load('[1]'))"
    assert run_python(source).error == "ModuleNotFoundError"
    assert run_python(source, Limits(memory_mb=512), site_packages=True).stdout == "[1]\n"


# ---- limits


def test_endless_loops_sleeps_and_ignored_signals_end(within):
    deaf = (
        "import signal\nfor n in range(1, 65):\n"
        "    try: signal.signal(n, lambda *_: None)\n    except (OSError, ValueError): pass\n"
        "print('deaf', flush=True)\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass"
    )
    for source, output in (("while True: pass", ""), ("import time\ntime.sleep(60)", ""), (deaf, "deaf\n")):
        started = time.monotonic()
        run = run_python(source, Limits(seconds=0.5), within=within)
        assert (run.ended, run.exit_code, run.stdout) == ("timeout", None, output)
        assert time.monotonic() - started < 3


def test_memory_of_one_process_and_of_all_together(within):
    assert run_python("x = 'a' * (1 << 30)", QUICK, within=within).error == "MemoryError"
    source = "import os, time\nfor _ in range(3): os.fork()\nx = b'a' * (50 << 20)\ntime.sleep(20)"
    assert run_python(source, QUICK, within=within).ended == "memory"
    limits = Limits(seconds=3.0, memory_mb=2048)
    assert run_python("x = 'a' * (1 << 30)\nprint(len(x))", limits, within=within).stdout == f"{1 << 30}\n"


def test_huge_output_is_cut_and_output_at_the_cap_is_whole(within):
    limits = Limits(seconds=5.0, output_kb=64)
    for stream in ("stdout", "stderr"):
        run = run_python(f"import sys\nwhile True: sys.{stream}.write('x' * 100000)", limits, within=within)
        assert run.ended == "output" and run.seconds < 4
        assert len(getattr(run, stream)) == 64 << 10
    run = run_python("print('x' * 65535)", limits, within=within)
    assert run.ended == "exit" and len(run.stdout) == 65536


def test_fork_bombs_end_and_leave_nothing(within):
    source = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass  # grupo-test-bomb"
    before = own_children()  # other tests may have left the helper processes of multiprocessing
    started = time.monotonic()
    run = run_python(source, Limits(seconds=2.0), within=within)
    assert run.ended in ("timeout", "processes") and time.monotonic() - started < 10
    assert own_children() <= before
    assert len(processes()) < 1000


def test_process_limit_counts_threads_and_binds_in_the_kernel(namespaces):
    source = (
        "import threading, time\ncount = 0\ntry:\n    for _ in range(50):\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); count += 1\n"
        "except RuntimeError: pass\nimport os\nprint(count, flush=True)\nos._exit(0)"
    )
    assert run_python(source, Limits(processes=5), within=namespaces).stdout == "4\n"


def test_files_are_small_and_few(within):
    limits = Limits(seconds=3.0, file_mb=1)
    source = "open('a', 'wb').write(b'x' * (2 << 20))"
    assert run_python(source, limits, within=within).exit_code not in (0, None)
    assert run_python("fs = [open(f'{n}', 'w') for n in range(100)]", limits, within=within).error == "OSError"
    assert run_python("open('a', 'wb').write(b'x' * (1 << 19)); print(1)", limits, within=within).stdout == "1\n"


def test_the_scratch_folder_has_an_end(namespaces):
    source = "for n in range(9): open(f'{n}', 'wb').write(b'x' * (1 << 19))"
    run = run_python(source, Limits(file_mb=1), within=namespaces)
    assert run.error == "OSError" and "space" in run.error_text


def test_limits_cannot_be_lifted(within):
    source = (
        "import resource as r\n"
        "for name in ('RLIMIT_AS', 'RLIMIT_CPU', 'RLIMIT_FSIZE', 'RLIMIT_NPROC', 'RLIMIT_NOFILE'):\n"
        "    try: r.setrlimit(getattr(r, name), (r.RLIM_INFINITY, r.RLIM_INFINITY)); print(name)\n"
        "    except (ValueError, OSError): pass"
    )
    run = run_python(source, within=within)
    assert run.exit_code == 0
    if within.namespaces or os.geteuid() != 0:  # root without namespaces may: the docs say so
        assert run.stdout == ""


def test_limits_that_cannot_be_met_are_refused():
    wrong = [("seconds", 0), ("seconds", float("nan")), ("memory_mb", 10), ("processes", -1), ("open_files", 3)]
    for name, value in wrong:
        with pytest.raises(ConfigError, match=r"sandbox limit|too little"):
            Limits(**{name: value})


# ---- nothing is left behind

STRAGGLER = """
import os, sys, time
for _ in range({depth}):
    if os.fork(): os._exit(0)
    os.setsid()
os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(30)  # {mark}"])
"""


@pytest.mark.parametrize("depth", [0, 3])
def test_stragglers_in_sessions_of_their_own_are_killed(within, depth):
    mark = f"grupo-straggler-{os.getpid()}-{depth}-{within.namespaces}"
    inner = STRAGGLER.format(depth=depth, mark=mark).replace("\n", "\n    ")
    source = f"import os, time\nif os.fork() == 0:\n    {inner}\ntime.sleep(0.5)\nprint('left')"
    before = own_children()
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(_seen_within(mark, 2.0)))
    thread.start()
    run = run_python(source, QUICK, within=within)
    thread.join()
    assert run.ended == "exit" and run.stdout == "left\n"
    assert seen, "the straggler was never there: this test tests nothing"
    assert marked(mark) == [] and own_children() <= before


def _seen_within(mark: str, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := marked(mark):
            return found
        time.sleep(0.01)
    return []


def test_files_left_behind_are_removed(within, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = "import os, pathlib, tempfile\nprint(os.getcwd(), tempfile.gettempdir())\n"
    source += (
        "path = pathlib.Path('deep/er')\npath.mkdir(parents=True)\n"
        "(path / 'file').write_text('x')\nos.chmod(path, 0o500)"
    )
    run = run_python(source, within=within)
    folder, temporary = run.stdout.split()
    assert run.exit_code == 0 and folder == temporary
    assert list(tmp_path.iterdir()) == []
    if within.namespaces:
        assert not Path(folder).exists()


def test_everything_ends_with_the_training_process(within):
    mark = f"grupo-orphan-{os.getpid()}-{within.namespaces}"
    program = (
        "import sys\nfrom grupo.rewards.code.sandbox.runner import Isolation, Limits, run_python\n"
        f"within = Isolation({within.namespaces}, {within.other_user})\n"
        "run_python(sys.stdin.read(), Limits(seconds=20.0), within=within)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(sandbox.__file__).parents[4])}
    trainer = subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE)
    assert trainer.stdin is not None
    trainer.stdin.write(STRAGGLER.format(depth=0, mark=mark).encode())
    trainer.stdin.close()
    assert _seen_within(mark, 20.0)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 5
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert marked(mark) == []


# ---- what it sees


def test_the_environment_is_empty(within, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    run = run_python("import os; print(sorted(os.environ))", within=within)
    names = set(eval(run.stdout))
    ours = {"HOME", "LANG", "LC_CTYPE", "PATH", "TMPDIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"}
    assert names <= ours


def test_no_descriptor_of_ours_is_open(within):
    held = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(held, True)
    source = "import os\nfor n in range(3, 200):\n    try: os.fstat(n); print(n)\n    except OSError: pass"
    try:
        assert run_python(source, within=within).stdout == "4\n"  # the message channel
    finally:
        os.close(held)


def test_files_of_the_parent_are_out_of_reach(namespaces, tmp_path):
    secret = tmp_path / "gold.json"
    secret.write_text("42")
    secret.chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/") and folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    home = str(Path.home())
    paths = [str(secret), "/etc/passwd", home, "/proc/self/environ", f"/proc/{os.getpid()}/environ", __file__]
    source = f"import os\nfor path in {paths!r}:\n    if os.path.isfile(path) or os.path.isdir(path): print(path)"
    allowed = {home} if Path(sys.base_prefix).is_relative_to(Path.home()) else set()
    assert set(run_python(source, within=namespaces).stdout.split()) <= allowed


def test_nothing_outside_of_the_scratch_folder_can_be_written(namespaces):
    source = (
        "import os, sys\nfor path in ('/', '/usr', '/usr/bin', '/dev', sys.base_prefix, os.__file__):\n"
        "    try:\n        target = path if path.endswith('.py') else path + '/grupo-was-here'\n"
        "        os.close(os.open(target, os.O_WRONLY | os.O_CREAT)); print(target)\n    except OSError: pass\n"
        "open('fine', 'w').close(); open('/tmp/fine too', 'w').close() if os.path.islink('/tmp') else None"
    )
    run = run_python(source, within=namespaces)
    assert run.stdout == "" and run.exit_code == 0


def test_the_root_holds_the_system_python_and_nothing_else(namespaces):
    python = Path(os.path.realpath(sys.base_prefix))
    top = set(eval(run_python("import os; print(os.listdir('/'))", within=namespaces).stdout))
    system = {"bin", "dev", "etc", "lib", "lib32", "lib64", "nix", "sbin", "scratch", "tmp", "usr"}
    assert {"dev", "scratch", "usr"} <= top <= {*system, python.parts[1]}
    source = f"import os\nfor path in {[str(path) for path in python.parents[:-1]]!r}: print(os.listdir(path))"
    for line, path in zip(run_python(source, within=namespaces).stdout.splitlines(), python.parents, strict=False):
        if path not in (Path("/usr"), Path("/")):
            assert len(eval(line)) == 1, f"beside Python there is something in {path}"


def test_there_is_no_network(namespaces):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('connected')"
        run = run_python(source, within=namespaces)
        assert run.stdout == "" and run.error in ("OSError", "ConnectionRefusedError")
        plain = run_python(source, within=Isolation(False, False))
        assert plain.stdout == "connected\n", "the server is there"
    names = run_python("import socket; print([name for _, name in socket.if_nameindex()])", within=namespaces).stdout
    assert set(eval(names)) <= {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0"}


def test_other_processes_are_neither_seen_nor_reached(namespaces):
    source = (
        f"import os, signal\nprint(os.listdir('/proc') if os.path.exists('/proc') else [])\nos.kill({os.getpid()}, 0)"
    )
    run = run_python(source, within=namespaces)
    assert run.stdout == "[]\n" and run.error == "ProcessLookupError"
    ends = run_python(
        "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(-1, signal.SIGTERM)\nprint('alive')", within=namespaces
    )
    assert ends.ended == "exit"


def test_it_is_nobody_and_stays_so(namespaces):
    source = (
        "import os, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid() != 0, os.geteuid() != 0)\n"
        "for call in (lambda: os.setuid(0), lambda: os.chroot('/'), lambda: os.mknod('x', 0o60600, 0)):\n"
        "    try: call(); print('done')\n    except OSError: print('refused')\n"
        "print(libc.unshare(0x10000000), libc.mount(b'none', b'/scratch', b'tmpfs', 0, None))"
    )
    run = run_python(source, within=namespaces)
    assert run.stdout.splitlines() == ["True True", "refused", "refused", "refused", "-1 -1"]


def test_a_forged_message_is_not_believed(within):
    forge = "import json, os\nos.write(4, json.dumps({'values': [4], 'token': ''}).encode())\nos._exit(0)"
    run = run_python(SandboxJob(forge, calls=(Call("f", ()),)), within=within)
    assert not run.finished and run.values is None
    for junk in ("[" * 100_000, "[]", "7", '{"values": 3, "token": 4}', "\\xff"):
        run = run_python(
            SandboxJob(f"import os\nos.write(4, {junk!r}.encode())\nos._exit(0)", calls=(Call("f", ()),)), within=within
        )
        assert not run.finished


def test_values_that_are_none_are_errors():
    for returned in ("object()", "lambda: 1", "(x for x in 'ab')", "print"):
        run = run_python(SandboxJob(f"def f(): return {returned}", calls=(Call("f", ()),)))
        assert run.error == "TypeError" and "not a plain value" in run.error_text and run.values is None


# ---- many at once


def test_many_at_once_keep_their_order_and_their_ends(within):
    sources = [f"print({n})" if n % 3 else "while True: pass" for n in range(9)]
    runs = map_in_threads(lambda source: run_python(source, Limits(seconds=1.0), within=within), sources, 3)
    assert [run.stdout for run in runs] == [f"{n}\n" if n % 3 else "" for n in range(9)]
    assert [run.ended for run in runs] == ["exit" if n % 3 else "timeout" for n in range(9)]


def test_isolation_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation(False, False, "unshare: Operation not permitted"))
    with pytest.warns(
        UserWarning, match=r"no namespaces \(unshare: Operation not permitted\).*network and files included"
    ):
        sandbox.warn_if_not_isolated("code_reward")


def test_scratch_folders_that_resist_removal_are_removed(within, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nested = (
        "import os\nfor _ in range(1200):\n    os.mkdir('a' * 4)\n    os.symlink('/etc', 'b')\n    os.chdir('a' * 4)\n"
    )
    for source in (nested, "import os\nos.mkdir('a')\nos.chmod('a', 0)\nos.chmod('.', 0)"):
        assert run_python(source, within=within).ended == "exit"
        assert list(tmp_path.iterdir()) == [] and os.path.isdir("/etc")
