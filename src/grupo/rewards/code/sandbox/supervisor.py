"""The process between grupo and one untrusted program: it fences the program in, watches it, and leaves nothing behind.

Never imported: `sandbox.py` starts this file as a program of its own (`python -I -S`), so that what happens to it does
not happen to the training process. Stdin brings the order (the count of its bytes in a line, then a marshalled
dictionary) and stays open as a lifeline: when it closes because the training process is gone, everything here is
killed. To stdout goes a plus sign when the order is there, and then the answer, a marshalled dictionary.

With namespaces (Linux, user namespaces allowed) the family is

    supervisor ── keeper (enters the namespaces) ── init (PID 1 inside) ── the program

The kernel kills whatever is left of a PID namespace when its init ends, whatever sessions it has fled to. Without
namespaces the supervisor is the program's parent and the *subreaper* of its orphans, and kills them one by one.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import selectors
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and json take as long to import as everything else here together
    from typing import Any, NoReturn

NOBODY = 65534
WATCH_SECONDS = 0.05
"""Between two looks at how many processes there are and what memory they hold."""
KILL_SECONDS = 10.0
PAGE = resource.getpagesize()

# <linux/sched.h>, <linux/prctl.h>, <linux/mount.h>
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
LOCKED_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""statvfs flag -> mount flag, of those that a remount in a user namespace has to repeat."""

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SCRATCH = "/scratch"

libc = ctypes.CDLL(None, use_errno=True)


def system_call(name: str, *arguments: Any) -> None:
    packed = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    if getattr(libc, name)(*packed) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    system_call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


# ---- the program's process


def start_program(
    order: dict[str, Any], fds: dict[str, int], folder: str, user: int | None, spare_tasks: int
) -> NoReturn:
    """Become the program: descriptors, limits, user, interpreter. Runs in a child that has just been forked."""
    try:
        os.setsid()
        for target, name in enumerate(("stdin", "stdout", "stderr", "job", "message")):
            os.dup2(fds[name], target + 100)
        os.closerange(0, 100)
        for target in range(5):
            os.dup2(target + 100, target)
        os.closerange(5, 4096)
        os.chdir(folder)
        os.umask(0o022)
        if user is not None:
            # Denied where a plain user made the namespace: the groups stay, and own nothing that can be seen.
            with suppress(PermissionError):
                os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        if sys.platform == "linux":
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        set_limits(order, spare_tasks)
        environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        # Threads count as processes, and reserve address space, which counts as memory.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        os.execve(order["command"][0], order["command"], environment)
    except BaseException as error:
        os.write(2, f"sandbox: the program could not be started: {error!r}".encode())
    os._exit(127)


def set_limits(order: dict[str, Any], spare_tasks: int) -> None:
    """Hard limits, so that the program cannot lift them."""
    mib = 1 << 20
    seconds = int(order["seconds"]) + 1  # the clock on the wall is the supervisor's
    limits = {
        "RLIMIT_AS": order["memory_mb"] * mib,
        "RLIMIT_FSIZE": order["file_mb"] * mib,
        "RLIMIT_NOFILE": order["open_files"],
        "RLIMIT_CORE": 0,
    }
    if spare_tasks >= 0:
        limits["RLIMIT_NPROC"] = order["processes"] + spare_tasks
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # SIGXCPU, which names the reason, then SIGKILL
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (ValueError, OSError):
            if sys.platform == "linux":  # macOS refuses some of them
                raise


# ---- namespaces


def enter_namespaces(order: dict[str, Any], ready: int, mapped: int) -> None:
    """New user, mount, PID, network, IPC and host-name namespaces, and a root with nothing but system and Python in it.

    `ready` tells the supervisor to write the user mapping, which must be done from outside; `mapped` waits for it.
    """
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    system_call("unshare", flags)
    os.write(ready, b"1")
    if os.read(mapped, 1) != b"1":
        raise PermissionError("the user mapping was refused")
    with suppress(OSError):  # no further namespaces, in which the program would be root again
        write("/proc/sys/user/max_user_namespaces", "0")
    build_root(order["stage"], order["visible"], order["file_mb"])


def build_root(stage: str, visible: list[str], scratch_mb: int) -> None:
    """Pivot into a tmpfs that holds read-only binds of `visible` and a scratch folder. No /proc, no /sys, no home.

    `stage` is any folder to mount it on; what is mounted there is not seen outside of this namespace.
    """
    os.umask(0o022)
    system_call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    system_call("mount", "tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{stage}/old")
    system_call("pivot_root", stage, f"{stage}/old")
    os.chdir("/")
    bound: list[str] = []
    for path in sorted({*SYSTEM_PATHS, *visible}, key=len):
        if any(path.startswith(parent + "/") for parent in bound) or not os.path.lexists("/old" + path):
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink("/old" + path):
            os.symlink(os.readlink("/old" + path), path)
        else:
            bind(path, MS_RDONLY | MS_NOSUID | MS_NODEV)
            bound.append(path)
    os.makedirs("/dev", exist_ok=True)
    for path in filter(lambda path: os.path.exists("/old" + path), DEVICES):
        bind(path, MS_NOSUID)
    os.mkdir(SCRATCH)
    system_call(
        "mount", "tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_mb}m,mode=777,nr_inodes=10000"
    )
    if not os.path.lexists("/tmp"):
        os.symlink(SCRATCH, "/tmp")
    system_call("umount2", "/old", MNT_DETACH)
    os.rmdir("/old")
    system_call("mount", "none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)


def bind(path: str, flags: int) -> None:
    if os.path.isdir("/old" + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    system_call("mount", "/old" + path, path, None, MS_BIND | MS_REC, None)
    present = os.statvfs(path).f_flag
    kept = sum(mount_flag for flag, mount_flag in LOCKED_FLAGS.items() if present & flag)
    system_call("mount", "none", path, None, MS_REMOUNT | MS_BIND | flags | kept, None)


def write_mapping(keeper: int) -> None:
    """Who the program is outside: nobody where we are root, otherwise the user. Inside it is nobody either way."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        # The keeper stays root to reach an interpreter below /root; RLIMIT_NPROC does not bind root, so the program
        # must be someone else.
        try:
            write(f"/proc/{keeper}/uid_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            write(f"/proc/{keeper}/gid_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return
        except OSError:  # a container without a user 65534: its root is no root outside
            pass
    write(f"/proc/{keeper}/setgroups", "deny")
    write(f"/proc/{keeper}/uid_map", f"{NOBODY} {user} 1\n")
    write(f"/proc/{keeper}/gid_map", f"{NOBODY} {group} 1\n")


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def keep(order: dict[str, Any], fds: dict[str, int], status: int, ready: int, mapped: int) -> NoReturn:
    """The keeper: enter the namespaces, start init, report its process id, wait for its end."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        enter_namespaces(order, ready, mapped)
        init = os.fork()
        if init == 0:
            be_init(order, fds, status)
        os.write(status, f"init {init}\n".encode())
        os.waitpid(init, 0)
        os._exit(0)
    except BaseException as error:
        os.write(status, f"failed {error}\n".encode())
    os._exit(1)


def be_init(order: dict[str, Any], fds: dict[str, int], status: int) -> NoReturn:
    """PID 1 of the namespace: start the program, reap orphans, report how the program ended, and end with it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)  # the program has the same user in some cases, and must not trace us
    # Where the program shares its user with keeper and init, these two count against its limit as well.
    spare = 0 if os.geteuid() == 0 else 2
    program = os.fork()
    if program == 0:
        start_program(order, fds, SCRATCH, NOBODY, spare)
    for name in ("stdin", "stdout", "stderr", "job", "message"):
        os.close(fds[name])
    os.write(status, b"started 0\n")
    while True:
        ended, code = os.wait()
        if ended == program:
            os.write(status, f"ended {code}\n".encode())
            os._exit(0)


# ---- watching


def children(pid: int) -> list[int]:
    try:
        found = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
        return found
    except FileNotFoundError:
        if os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
            return []  # it has just ended
    except OSError:
        return []
    found = []
    entries = os.listdir("/proc") if os.path.isdir("/proc") else []  # a kernel without the lists of children
    for entry in filter(str.isdigit, entries):
        try:
            with open(f"/proc/{entry}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry))
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    found, unseen = [], [pid]
    while unseen:
        below = children(unseen.pop())
        found += below
        unseen += below
    return found


def tasks_and_memory(pid: int) -> tuple[int, int]:
    """Threads of all descendants, and the bytes they hold."""
    tasks = held = 0
    for one in descendants(pid):
        try:
            tasks += len(os.listdir(f"/proc/{one}/task"))
            with open(f"/proc/{one}/statm") as file:
                held += int(file.read().split()[1]) * PAGE
        except (OSError, ValueError):
            continue
    return tasks, held


def tasks_of_user() -> int:
    """Threads that this user runs anywhere; -1 where that cannot be told. RLIMIT_NPROC counts them all."""
    if not os.path.isdir("/proc/self"):
        return -1
    count = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{entry}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:
            continue
    return count


def kill_all(family: dict[str, int]) -> None:
    """Kill what the program has started, and wait until it is gone."""
    if "init" in family:
        send_signal(family["init"], signal.SIGKILL)
    elif "keeper" in family:
        send_signal(family["keeper"], signal.SIGKILL)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(family["program"], signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        try:  # a subreaper without children has no descendants at all
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if "keeper" not in family:
            # Stopped first, all of them: what still forks while it is being killed would win the race.
            stopped: set[int] = set()
            while fresh := set(descendants(os.getpid())) - stopped:
                for pid in fresh:
                    send_signal(pid, signal.SIGSTOP)
                stopped |= fresh
            for pid in stopped:
                send_signal(pid, signal.SIGKILL)
        time.sleep(0.002)


def send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class Watch:
    """Reads what the program writes, never more than the cap, until it ends or breaks a limit."""

    def __init__(self, order: dict[str, Any], readers: dict[str, int], family: dict[str, int]) -> None:
        self.order = order
        self.family = family
        self.cap = order["output_kb"] << 10
        self.read = {name: bytearray() for name in readers}
        self.overflow = False
        self.lifeline_cut = False
        self.wait_status: int | None = None
        self.failure = ""
        self.selector = selectors.DefaultSelector()
        for name, descriptor in readers.items():
            os.set_blocking(descriptor, False)
            self.selector.register(descriptor, selectors.EVENT_READ, name)
        self.selector.register(0, selectors.EVENT_READ, "lifeline")

    def until_end(self) -> str:
        """Which of 'exit', 'timeout', 'memory', 'processes', 'output' or 'failed' it was."""
        started = time.monotonic()
        next_look = started + WATCH_SECONDS
        while True:
            now = time.monotonic()
            self.take(min(WATCH_SECONDS, max(started + self.order["seconds"] - now, 0.0)))
            if self.lifeline_cut:
                kill_all(self.family)
                if self.order["folder"]:
                    import shutil

                    shutil.rmtree(self.order["folder"], ignore_errors=True)
                os._exit(1)
            if self.failure:
                return "failed"
            if self.overflow:
                return "output"
            if self.wait_status is not None:
                return "exit"
            now = time.monotonic()
            if now >= started + self.order["seconds"]:
                return "timeout"
            if now >= next_look:
                next_look = now + WATCH_SECONDS
                tasks, held = tasks_and_memory(self.family.get("init", os.getpid()))
                if tasks > self.order["processes"]:
                    return "processes"
                if held > self.order["memory_mb"] << 20:
                    return "memory"

    def take(self, seconds: float) -> None:
        """What is there to be read within `seconds`, and whether the program has ended."""
        for key, _ in self.selector.select(seconds):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if key.data == "lifeline":
                self.lifeline_cut = not data
            elif not data:
                self.selector.unregister(key.fd)
            else:
                room = self.cap - len(self.read[key.data])
                self.read[key.data] += data[:room]
                self.overflow = self.overflow or len(data) > room
        self.note_status()
        if "program" in self.family and self.wait_status is None:
            try:
                ended, code = os.waitpid(self.family["program"], os.WNOHANG)
            except ChildProcessError:  # killed and reaped
                return
            self.wait_status = code if ended else None

    def note_status(self) -> None:
        """What keeper and init report, where there are any."""
        for line in self.read.get("status", b"").decode(errors="replace").splitlines():
            word, _, rest = line.partition(" ")
            if word == "init":
                self.family["init"] = int(rest)
            elif word == "ended":
                self.wait_status = int(rest)
            elif word == "failed":
                self.failure = rest

    def rest(self) -> None:
        """What the pipes still hold when everybody is dead."""
        self.selector.unregister(0)
        while any(self.selector.get_map().values()) and not self.overflow:
            before = len(self.selector.get_map()), sum(map(len, self.read.values()))
            self.take(0.0)
            if before == (len(self.selector.get_map()), sum(map(len, self.read.values()))):
                return


def supervise(order: dict[str, Any]) -> dict[str, Any]:
    fds, readers = {}, {}
    for name in ("stdout", "stderr", "message"):
        readers[name], fds[name] = os.pipe()
    fds["job"] = file_with(order["job"])
    fds["stdin"] = os.open(os.devnull, os.O_RDONLY) if order["stdin"] is None else file_with(order["stdin"])
    started = time.monotonic()
    folder = ""
    if order["namespaces"]:
        readers["status"], status = os.pipe()
        ready_read, ready = os.pipe()
        mapped, mapped_write = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            os.close(ready_read)
            os.close(mapped_write)
            keep(order, fds, status, ready, mapped)
        family = {"keeper": keeper}
        os.close(ready)
        os.close(status)
        if os.read(ready_read, 1) == b"1":
            try:
                write_mapping(keeper)
                os.write(mapped_write, b"1")
            except OSError as error:
                kill_all(family)
                return {"ended": "failed", "failure": f"user mapping: {error}"}
    else:
        if sys.platform == "linux":
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        folder = order["folder"]
        user = other_user(folder) if order["drop_user"] else None
        spare = 0 if user is not None else tasks_of_user()
        program = os.fork()
        if program == 0:
            start_program(order, fds, folder, user, spare)
        family = {"program": program}
    for descriptor in fds.values():
        os.close(descriptor)
    watch = Watch(order, readers, family)
    ended = watch.until_end()
    kill_all(family)
    watch.rest()
    return {
        "ended": "output" if watch.overflow else ended,
        "failure": watch.failure,
        "wait_status": watch.wait_status,
        "seconds": time.monotonic() - started,
        **{name: bytes(watch.read[name]) for name in ("stdout", "stderr", "message")},
    }


def other_user(folder: str) -> int | None:
    """A user for this program alone, who owns nothing but the scratch folder."""
    for user in (1_900_000_000 + int.from_bytes(os.urandom(4), "little") % 100_000_000, NOBODY):
        try:
            os.chown(folder, user, user)
            return user
        except OSError:
            continue
    return None


def file_with(data: bytes) -> int:
    """A descriptor of a nameless file with this content; a pipe would block us where the program does not read."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("grupo")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def main() -> None:
    # Not through sys.stdin, whose buffer would swallow the end of the lifeline.
    count = b""
    while not count.endswith(b"\n"):
        count += os.read(0, 1) or b"0\n"
    order = bytearray()
    while len(order) < int(count):
        data = os.read(0, int(count) - len(order))
        if not data:
            return
        order += data
    os.write(1, b"+")  # from here on, what happens to us may be the doing of the program
    answer = marshal.dumps(supervise(marshal.loads(order)))
    while answer:
        answer = answer[os.write(1, answer) :]


if __name__ == "__main__":
    main()
