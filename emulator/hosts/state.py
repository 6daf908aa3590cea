"""What is kept of a running cluster between commands, and when it may be believed.

One directory per cluster, ``<root>/<cluster>/``: ``state.json``, ``control.sock``, ``logs/``, ``runs/``. The
supervisor holds an flock on the directory itself for as long as it lives, so the kernel says whether a
cluster is up; the file only says who it is. A recorded pid counts only with the same boot id and the same
process start time; from then on a pidfd stands for the process, which no recycled pid can take over.

Invariants: files are replaced atomically; nothing outside the cluster's own directory is ever written or
removed; a state that cannot be read, is of another boot, or names a process with another start time is
treated as absent. Must not import topology, trio or anything of the roles.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import ConfigError, EmulatorError

__all__ = [
    "Claim",
    "ClusterDir",
    "ClusterState",
    "ProcessId",
    "boot_id",
    "check_cluster_name",
    "cluster_dirs",
    "state_root",
]

ROOT_VARIABLE = "EMULATE_STATE_DIR"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}")


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """What keeps a state directory from being used is for the user to mend, and so is said in one line."""
    try:
        yield
    except OSError as error:
        raise EmulatorError(
            f"{path}: cannot keep a cluster's state: {error.strerror}; {ROOT_VARIABLE} names another place"
        ) from None


def boot_id() -> str:
    """The kernel's random identity of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class ProcessId(msgspec.Struct, frozen=True):
    """A process for as long as this boot lasts: pids are recycled, (pid, start time in ticks) is not."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a live (or unreaped) process, None where there is none."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The command name is in parentheses and may hold anything, blanks and parentheses included.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] in (b"Z", b"X"):
            return None
        return cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return self.pid > 0 and ProcessId.of(self.pid) == self

    @contextlib.contextmanager
    def hold(self) -> Iterator[int | None]:
        """A pidfd proven to be this very process, or None when it is gone."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except (ProcessLookupError, ValueError):
            yield None
            return
        except OSError as error:
            # EINVAL: the pid is a thread's, so the process is gone.
            if error.errno != errno.EINVAL:
                raise
            yield None
            return
        try:
            yield pidfd if self.alive else None
        finally:
            os.close(pidfd)

    def send(self, signum: signal.Signals) -> bool:
        """Signal this very process; False when it is gone."""
        with self.hold() as pidfd:
            if pidfd is None:
                return False
            try:
                signal.pidfd_send_signal(pidfd, signum)
            except ProcessLookupError:
                return False
            return True


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of state.json. Node pids are those of the supervisor's own PID namespace."""

    cluster: str
    boot: str
    phase: Literal["starting", "ready"]
    topology: str
    supervisor: ProcessId
    init: ProcessId | None = None
    nodes: dict[str, ProcessId] = {}


def state_root() -> Path:
    """Where clusters keep their state: $EMULATE_STATE_DIR, /run/emulate for root, else the user's runtime dir."""
    if chosen := os.environ.get(ROOT_VARIABLE):
        return Path(chosen).absolute()
    if os.geteuid() == 0:
        return Path("/run/emulate")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "emulate"
    return Path(f"/tmp/emulate-{os.geteuid()}")


def check_cluster_name(name: str) -> str:
    """``name`` if it can name a cluster; ConfigError otherwise, because it is also a directory's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"cluster name {name!r}: expected 1 to 32 of a-z 0-9 _ . - beginning with a letter or digit; "
            "choose one with --name"
        )
    return name


class ClusterDir:
    """The directory of one cluster, which may or may not exist."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = check_cluster_name(name)
        self.path = root / name

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def exists(self) -> bool:
        """Whether there is such a directory. EmulatorError when its place cannot be looked at."""
        with _one_line(self.path):
            return self.path.is_dir() and not self.path.is_symlink()

    def read(self) -> ClusterState | None:
        """The recorded state if it can be believed: readable, of this boot and of a live supervisor."""
        try:
            state = msgspec.json.decode((self.path / "state.json").read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError, ValueError):
            return None
        if state.cluster != self.name or state.boot != boot_id() or not state.supervisor.alive:
            return None
        return state

    def supervisor(self) -> ProcessId | None:
        """Who runs this cluster: as recorded, else who listens on its control socket (the kernel says who)."""
        if state := self.read():
            return state.supervisor
        try:
            with self.connect() as control:
                credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
        return ProcessId.of(struct.unpack("3i", credentials)[0])

    def connect(self) -> socket.socket:
        """A connection to the supervisor's control socket. OSError when nobody listens."""
        control = socket.socket(socket.AF_UNIX)
        try:
            with self._opened() as fd:
                # Through the descriptor, because a socket's path is limited to 107 bytes.
                control.connect(f"/proc/self/fd/{fd}/control.sock")
        except BaseException:
            control.close()
            raise
        return control

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            yield fd
        finally:
            os.close(fd)

    def claim(self) -> Claim | None:
        """Take the name for this process's life; None while another holds it. Left-overs are removed.

        EmulatorError with the reason where the directory cannot be made or is another user's.
        """
        with _one_line(self.path):
            return self._claim()

    def _claim(self) -> Claim | None:
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o711)
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            try:
                same = os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False))
            except FileNotFoundError:
                same = False
            if same:
                return Claim(self, fd)
            # Its owner removed the directory between our open and our lock.
            os.close(fd)


class Claim:
    """A cluster's name, held. ``release`` removes the directory; a process that dies just lets go of it."""

    def __init__(self, directory: ClusterDir, fd: int) -> None:
        self.directory = directory
        self._fd = fd

    def clear(self) -> None:
        """Empty the directory."""
        for entry in self.directory.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def write(self, state: ClusterState) -> None:
        """Replace state.json atomically. EmulatorError with the file and the reason when it cannot be kept."""
        path = self.directory.path / "state.json"
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                file.write(msgspec.json.encode(state))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise EmulatorError(f"{path}: cannot keep the cluster's state: {error.strerror}") from None

    def listen(self) -> socket.socket:
        """The control socket, listening; only the owner of the directory may connect."""
        control = socket.socket(socket.AF_UNIX)
        path = f"/proc/self/fd/{self._fd}/control.sock"
        try:
            control.bind(path)
            os.chmod(path, 0o600)
            control.listen()
        except OSError as error:
            control.close()
            raise EmulatorError(f"{self.directory.path}: no control socket: {error.strerror}") from None
        return control

    def release(self) -> None:
        """Remove the directory, then let go of the name. Idempotent."""
        if self._fd < 0:
            return
        try:
            shutil.rmtree(self.directory.path, ignore_errors=True)
        finally:
            os.close(self._fd)
            self._fd = -1


def cluster_dirs(root: Path) -> list[ClusterDir]:
    """The cluster directories under ``root``, sorted by name; other files and names are not ours.

    EmulatorError when ``root`` is there and cannot be read.
    """
    with _one_line(root):
        try:
            names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink())
        except FileNotFoundError:
            return []
    return [ClusterDir(root, name) for name in names if _NAME.fullmatch(name)]
