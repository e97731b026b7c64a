"""The socket a server listens on: taken, listening, before anything loads, so that a second server on the same address is refused at once.

Connections that come while the model loads wait in the socket's queue.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from octavo.errors import ConfigError

BACKLOG = 2048
_made: dict[str, tuple[int, int]] = {}  # this process' socket files: path → device and inode


def bind(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A listening socket. Raises: ConfigError when the address is in use or impossible."""
    if uds is not None:
        return _bind_path(uds)
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, not {port}", "port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r}: {getattr(error, 'strerror', None) or error}", "host") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)  # two may bind before either listens; the second to listen is refused
    except OSError as error:
        sock.close()
        raise _refused(error, host, port) from None
    return sock


def address_of(sock: socket.socket) -> str:
    """Where the socket is, as people and clients write it."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"


def remove_files() -> None:
    """Remove this process' socket files, unless another server has put its own there.

    To be called while the sockets are open: an inode may be given again afterwards.
    """
    while _made:
        path, made = _made.popitem()
        with suppress(OSError):
            found = os.stat(path)
            if (found.st_dev, found.st_ino) == made:
                os.unlink(path)


def _bind_path(path: str) -> socket.socket:
    if not path.strip():
        raise ConfigError("the path of the Unix socket is empty", "uds")
    path = os.path.abspath(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(os.path.dirname(path)):  # or two servers could each take the other's new file for a dead one's
            _clear(path)
            sock.bind(path)
            found = os.stat(path)
            _made[path] = (found.st_dev, found.st_ino)
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot make the socket {path}: {error.strerror or error}", "uds") from None
    except ConfigError:
        sock.close()
        raise
    return sock


def _clear(path: str) -> None:
    """Remove what a server that was killed left there. Raises: ConfigError when it is anything else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket", "uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue would make it wait
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise ConfigError(f"another process serves on {path}", "uds")
    os.unlink(path)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the folder's lock, which leaves no file behind."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _refused(error: OSError, host: str, port: int) -> ConfigError:
    """The system's refusal, for people."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use by another process: give another one, or 0 for any that is free", "port")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} needs more rights than this process has; ports from 1024 on do not", "port")
    return ConfigError(f"cannot take port {port} on {host}: {error.strerror or error}", "host")
