"""The files in which a rank keeps pages of the KV cache, in a folder of its own of `--kv-dir`.

The folder has a key of 32 random bytes. The names of the files are keyed hashes of what their pages hold, and each file
begins with a code that authenticates its bytes (keyed BLAKE2, RFC 7693). Without the key no file can be found or
checked, so a folder that has lost its key is wiped.

Only the user of the server can enter the folder, and a lock lets one server use it at a time. A file has its name only
once it is complete. A file that is damaged counts as missing.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from ..protocol.errors import EngineError

CODE_BYTES = 32
"""Bytes of the code at the beginning of each file."""
_KEY_BYTES = 32
_PAGE, _PART = ".page", ".part"
_SPARE = 16
"""If a page does not fit, one in so many of all bytes is freed, so that files are rarely sorted by age."""


class _File(NamedTuple):
    """The file of a page. used_at: when the page was last used, in nanoseconds; the modification time of the file."""

    nbytes: int
    used_at: int


class PageFiles:
    """The pages that rank `rank` keeps in `directory`, in files of at most `capacity` bytes together.

    identity: of what the bytes of a page depend on beside its tokens (cache_identity.py). A page is named by a digest
    of its tokens and of all before them. nbytes: of all files, at most `capacity`. Several threads may use the methods.

    Raises EngineError for a directory that cannot be used, that other users can enter, or that another server uses.
    """

    def __init__(self, directory: Path, rank: int, capacity: int, identity: bytes) -> None:
        self.folder = directory / f"rank-{rank}"
        self.nbytes = 0
        self.capacity = capacity
        self._identity = identity
        self._files: dict[str, _File] = {}
        self._changing = threading.Lock()
        with contextlib.ExitStack() as opened:
            try:
                parent = _open_private(str(directory), None, directory)
                opened.callback(os.close, parent)
                self._fd = _open_private(self.folder.name, parent, self.folder)
                opened.callback(os.close, self._fd)
                opened.callback(os.close, self._lock())
                self._key = self._read_key() or self._new_key()
                self._find_files()
            except OSError as error:
                raise EngineError(
                    f"--kv-dir: {self.folder}: expected a directory for pages, found: {error.strerror}"
                ) from error
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Let another server use the folder."""
        self._opened.close()

    def __contains__(self, digest: bytes) -> bool:
        return self._name(digest) in self._files

    def touch(self, digest: bytes, used_at: int) -> bool:
        """Note that a page is used. Returns False if there is no file of it."""
        name = self._name(digest)
        with self._changing:
            if name not in self._files:
                return False
            try:
                os.utime(name, ns=(used_at, used_at), dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:  # someone has removed it
                self._remove(name)
                return False
            self._files[name] = self._files[name]._replace(used_at=used_at)
        return True

    def write(self, digest: bytes, content: memoryview, used_at: int) -> bool:
        """Write a page for which there is no file. Pages whose last use is earlier make room for it; returns False if
        that is not enough. Raises OSError if the file cannot be written; nothing is left of it then."""
        name, nbytes = self._name(digest), CODE_BYTES + content.nbytes
        if not self._make_room(nbytes, used_at):
            return False
        self._put(name, used_at, self._code(name, content), content)
        with self._changing:
            self._files[name] = _File(nbytes, used_at)
            self.nbytes += nbytes
        return True

    def read(self, digest: bytes, nbytes: int) -> memoryview | None:
        """Return the `nbytes` bytes of a page. Removes the file and returns None if it is damaged or cannot be read."""
        name = self._name(digest)
        data = bytearray(CODE_BYTES + nbytes)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
            with open(fd, "rb") as file:
                whole = os.fstat(fd).st_size == len(data) and file.readinto(data) == len(data)
        except OSError:
            whole = False
        content = memoryview(data)[CODE_BYTES:]
        if whole and hmac.compare_digest(data[:CODE_BYTES], self._code(name, content)):
            return content
        with self._changing:
            self._remove(name)
        return None

    def _name(self, digest: bytes) -> str:
        return hashlib.blake2b(self._identity + digest, key=self._key, digest_size=20).hexdigest() + _PAGE

    def _code(self, name: str, content: memoryview) -> bytes:
        code = hashlib.blake2b(name.encode(), key=self._key, digest_size=CODE_BYTES)
        code.update(content)
        return code.digest()

    def _lock(self) -> int:
        """Return a descriptor that holds the lock of the folder."""
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise EngineError(
                f"--kv-dir: {self.folder}: expected a directory that no running server uses, found one in use"
            ) from None
        return lock

    def _read_key(self) -> bytes | None:
        """Return the key of the folder, or None if it is lost."""
        try:
            fd = os.open("key", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            key = file.read(_KEY_BYTES + 1)
        return key if len(key) == _KEY_BYTES else None

    def _new_key(self) -> bytes:
        """Wipe the folder and return its new key."""
        for name in self._names():
            os.unlink(name, dir_fd=self._fd)
        key = secrets.token_bytes(_KEY_BYTES)
        self._put("key", None, key)
        return key

    def _find_files(self) -> None:
        """Find the pages of earlier servers. Remove what is no complete file, and what exceeds the capacity."""
        for name in self._names():
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if name.endswith(_PAGE) and stat.S_ISREG(status.st_mode):
                self._files[name] = _File(status.st_size, status.st_mtime_ns)
                self.nbytes += status.st_size
            else:
                os.unlink(name, dir_fd=self._fd)
        newest = max((file.used_at for file in self._files.values()), default=0)
        self._make_room(0, newest + 1)

    def _names(self) -> list[str]:
        """Return the names of all pages, complete or not."""
        return [name for name in os.listdir(self._fd) if name.endswith((_PAGE, _PART))]  # noqa: PTH208

    def _make_room(self, nbytes: int, used_at: int) -> bool:
        """Remove pages whose last use is before `used_at`, the earliest first, until there is room for `nbytes`.
        Returns False, and removes none, if that is not enough."""
        with self._changing:
            if self.nbytes + nbytes <= self.capacity:
                return True
            older = sorted((file.used_at, name) for name, file in self._files.items() if file.used_at < used_at)
            if self.nbytes - sum(self._files[name].nbytes for _, name in older) + nbytes > self.capacity:
                return False
            for _, name in older:
                if self.nbytes + nbytes <= self.capacity - self.capacity // _SPARE:
                    break
                self._remove(name)
            return True

    def _remove(self, name: str) -> None:
        if (file := self._files.pop(name, None)) is not None:
            self.nbytes -= file.nbytes
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def _put(self, name: str, used_at: int | None, *parts: bytes | memoryview) -> None:
        """Write a file, which gets its name once it is complete. used_at: None for the present."""
        part = name + _PART
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        try:
            with open(fd, "wb") as file:
                for content in parts:
                    file.write(content)
                file.flush()
                if used_at is not None:
                    os.utime(fd, ns=(used_at, used_at))
            os.rename(part, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            os.unlink(part, dir_fd=self._fd)
            raise


def _open_private(name: str, parent: int | None, shown: Path) -> int:
    """Return a descriptor of a directory that only this user can enter, which is made if there is none."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        raise EngineError(f"--kv-dir: {shown}: expected a directory, found a file or a symbolic link") from None
    status, user = os.fstat(fd), os.geteuid()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == user and not mode & 0o077:
        return fd
    os.close(fd)
    if status.st_uid != user:
        raise EngineError(f"--kv-dir: {shown}: expected a directory of user {user}, found one of user {status.st_uid}")
    raise EngineError(
        f"--kv-dir: {shown}: expected a directory that only its owner can enter (mode 0700), found mode {mode:04o}"
    )
