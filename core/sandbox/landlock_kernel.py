"""What Python's library lacks of the kernel's interface: Landlock, seccomp's notifications, capabilities. By ctypes.

Numbers and structures are those of linux/landlock.h, linux/seccomp.h and linux/capability.h. The packages for Landlock
on PyPI are young and the calls are three, which this project's policy rests on. Here is no policy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from core.sandbox.launcher import call

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # on every architecture
CREATE_RULESET_VERSION, RULE_PATH_BENEATH = 1, 1
SCOPES = 0b11  # abstract Unix sockets, signals
NEEDED_ABI = 6  # the first with scopes, Linux 6.12

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, REFER, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
ALL_FILE_RIGHTS = (1 << 16) - 1
ALL_NETWORK_RIGHTS = 0b11  # bind, connect: TCP
RIGHTS_ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the others are for directories
READ = EXECUTE | READ_FILE | READ_DIR
READ_WRITE = ALL_FILE_RIGHTS & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)
DEVICE = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, CAPABILITY_VERSION = 47, 4, 0x20080522
SECCOMP_SET_MODE_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 1 << 3, 1 << 5
NOTIFICATION_RECEIVE, NOTIFICATION_SEND = 0xC0502100, 0xC0182101
NOTIFICATION_ADD_DESCRIPTOR, ADD_AND_ANSWER = 0x40182103, 2
NOTIFICATION = struct.Struct("=QIIiIQ6Q")
SECCOMP_NUMBERS = {"x86_64": 317, "aarch64": 277}

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *values: int) -> None:
    call("prctl", option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))


def system_call(number: int, *arguments: object) -> int:
    """A system call that libc has no function for. Raises OSError."""
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def landlock_abi() -> int:
    """The version of Landlock here; 0 without it."""
    try:
        return system_call(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION)
    except OSError:
        return 0


def enter_scope() -> None:
    """Puts the calling process, for good, into a Landlock domain of its own, nested in the one it is in.

    Signals and abstract sockets reach no further than the domain. Files are as before: a domain above one that is about
    files would forbid moving them between directories (REFER), unless it grants just that.
    """
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        restrict(REFER, 0, [(root, REFER)])
    finally:
        os.close(root)


def enter_walls(rules: Iterable[tuple[int, int]]) -> None:
    """As `enter_scope`, and nothing of the file system can be opened or changed but by `rules`: pairs of an open path
    and the rights on what lies beneath. TCP can be neither bound nor connected."""
    restrict(ALL_FILE_RIGHTS, ALL_NETWORK_RIGHTS, rules)


def restrict(file_rights: int, network_rights: int, rules: Iterable[tuple[int, int]]) -> None:
    """Enters a domain that forbids these rights, but for what `rules` grant."""
    attributes = struct.pack("=QQQ", file_rights, network_rights, SCOPES)
    ruleset = system_call(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for descriptor, rights in rules:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= RIGHTS_ON_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        system_call(LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    system_call(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def drop_capabilities() -> None:
    with contextlib.suppress(OSError):
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    call("capset", struct.pack("=Ii", CAPABILITY_VERSION, 0), struct.pack("=6I", *[0] * 6))


def load_filter(program: bytes) -> int:
    """Loads a seccomp filter that asks; returns the descriptor on which it does. Needs no_new_privs."""
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    number = SECCOMP_NUMBERS[os.uname().machine]
    return system_call(number, SECCOMP_SET_MODE_FILTER, NEW_LISTENER | WAIT_KILLABLE, header)


@dataclass(frozen=True)
class Notification:
    """A system call of process `pid` that waits for its answer."""

    id: int
    pid: int
    number: int
    arguments: tuple[int, ...]


def receive_notification(listener: int) -> Notification | None:
    """None when its caller was killed meanwhile."""
    buffer = bytearray(NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, NOTIFICATION_RECEIVE, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    id, pid, _, number, _, _, *arguments = NOTIFICATION.unpack(buffer)
    return Notification(id, pid, number, tuple(arguments))


def answer(listener: int, id: int, error: int) -> None:
    """Has the call return 0, or fail with `error`. One whose caller is gone needs no answer."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(listener, NOTIFICATION_SEND, struct.pack("=QqiI", id, 0, -error, 0))


def answer_with_descriptor(listener: int, id: int, descriptor: int, close_on_exec: bool) -> None:
    """Has the call return a copy of `descriptor` as a new one of its process. Raises OSError, if it has too many."""
    flags = os.O_CLOEXEC if close_on_exec else 0
    fcntl.ioctl(listener, NOTIFICATION_ADD_DESCRIPTOR, struct.pack("=QIIII", id, ADD_AND_ANSWER, descriptor, 0, flags))
