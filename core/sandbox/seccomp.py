"""System calls that a sandbox is refused, as a seccomp filter: libseccomp compiles the tables below for the kernel.

Refused to every sandbox: what leads past a namespace (sockets of families that no network namespace holds, io_uring,
which makes sockets unseen by a filter, keyrings, which `request_key` has the kernel serve by a program outside), what
only a host's administrator needs, what looks into other processes, and what attacks on kernels begin with: namespaces
of one's own, mounts, bpf, perf, userfaultfd. `clone3` does not exist in there, as its flags lie in memory, where a
filter cannot read; every libc falls back to `clone`. Calls of another architecture (i386 and x32 on x86-64) would go
around the filter and do not exist either. `fallocate` is answered as by a file system that has none: it could take a
whole disk at once, while what is written byte by byte can be watched.

Not here: which processes get the filter, and bugs in the calls that remain.
"""

from __future__ import annotations

import errno
import functools
import importlib
import socket
import tempfile
from types import ModuleType
from typing import Any

MISSING = "libseccomp is missing, so no system call is refused: install libseccomp2 (Debian, Ubuntu) or libseccomp"

# Answered as if the kernel did not have them: programs probe for these and do without.
ABSENT = (
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "add_key", "request_key", "keyctl"),
    *("clone3", "userfaultfd"),
)
FORBIDDEN = (
    *("mount", "umount2", "pivot_root", "chroot", "move_mount", "mount_setattr", "open_tree", "open_tree_attr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "setns", "swapon", "swapoff", "quotactl", "quotactl_fd", "acct"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    *("bpf", "perf_event_open", "fanotify_init", "open_by_handle_at", "lookup_dcookie", "nfsservctl"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "syslog"),
    *("settimeofday", "clock_settime", "iopl", "ioperm", "vhangup", "uselib", "sethostname", "setdomainname"),
)
# Newer than some libseccomp; the same on all architectures.
NUMBERS = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429},
    **{"fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438},
    **{"process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467},
}
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of linux/sched.h
NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
CLONE_NEWTIME = 0x80  # means another thing to clone
# Of sandboxes without namespaces only:
SHARED_OBJECTS = (
    *("shmget", "shmat", "shmctl", "shmdt", "semget", "semop", "semtimedop", "semctl"),
    *("msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink"),
)
UNSHARED = ("bind", "listen", "accept", "accept4", "ioprio_set")
# Calls on processes, by an argument that is 0 when the caller means itself (or the kind that only so can be itself).
OF_OTHERS = (
    *(("prlimit64", 0), ("sched_setaffinity", 0), ("sched_setscheduler", 0), ("sched_setparam", 0)),
    *(("sched_setattr", 0), ("setpriority", 0), ("setpriority", 1), ("migrate_pages", 0), ("move_pages", 0)),
)
SOCKET_KINDS, MSG_FASTOPEN = 0xF, 0x20000000
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)


def library() -> ModuleType | None:
    try:
        return importlib.import_module("pyseccomp")
    except (ImportError, RuntimeError, OSError):  # the last two where libseccomp itself is missing or broken
        return None


@functools.cache
def program() -> bytes | None:
    """The filter in the kernel's own form, for bwrap's --seccomp; None without libseccomp."""
    seccomp = library()
    if seccomp is None:
        return None
    rules = new_filter(seccomp)
    for call in ("socket", "socketpair"):
        refuse_families(seccomp, rules, call, FAMILIES)
    return compiled(rules)


@functools.cache
def program_of_landlock() -> bytes | None:
    """The filter of a sandbox without namespaces, whose supervisor answers `socket` and `connect`.

    What a namespace would make private does not exist: System V's and POSIX's shared objects. Processes outside with
    the same user id cannot be limited or slowed down. A socket can neither listen nor be turned away from where it is
    connected to; a pair of them has no datagrams, as those can be sent to any path.
    """
    seccomp = library()
    if seccomp is None:
        return None
    rules = new_filter(seccomp)
    refuse_families(seccomp, rules, "socket", (socket.AF_INET,))
    refuse_families(seccomp, rules, "socketpair", (socket.AF_UNIX,))
    rules.add_rule(seccomp.NOTIFY, "socket", seccomp.Arg(0, seccomp.EQ, socket.AF_INET))
    rules.add_rule(seccomp.NOTIFY, "connect")
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        of_kind = seccomp.Arg(1, seccomp.MASKED_EQ, SOCKET_KINDS, kind)
        rules.add_rule(seccomp.ERRNO(errno.EPROTONOSUPPORT), "socketpair", of_kind)
    for name, argument in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        fast_open = seccomp.Arg(argument, seccomp.MASKED_EQ, MSG_FASTOPEN, MSG_FASTOPEN)
        rules.add_rule(seccomp.ERRNO(errno.EOPNOTSUPP), name, fast_open)
    for name in SHARED_OBJECTS:
        rules.add_rule(seccomp.ERRNO(errno.ENOSYS), number(seccomp, name))
    for name in UNSHARED:
        rules.add_rule(seccomp.ERRNO(errno.EACCES), number(seccomp, name))
    for name, argument in OF_OTHERS:
        rules.add_rule(seccomp.ERRNO(errno.EPERM), number(seccomp, name), seccomp.Arg(argument, seccomp.NE, 0))
    return compiled(rules)


def numbers(*names: str) -> dict[str, int]:
    """System calls' numbers here. Needs libseccomp."""
    seccomp = library()
    assert seccomp is not None
    return {name: number(seccomp, name) for name in names}


def new_filter(seccomp: ModuleType) -> Any:
    """What every sandbox is refused, but for sockets."""
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.ERRNO(errno.ENOSYS))
    for name in ABSENT:
        rules.add_rule(seccomp.ERRNO(errno.ENOSYS), number(seccomp, name))
    rules.add_rule(seccomp.ERRNO(errno.EOPNOTSUPP), "fallocate")
    for name in FORBIDDEN:
        rules.add_rule(seccomp.ERRNO(errno.EPERM), number(seccomp, name))
    for name, flags in (("clone", NAMESPACES), ("unshare", (*NAMESPACES, CLONE_NEWTIME))):
        for flag in flags:
            set_there = seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag)
            rules.add_rule(seccomp.ERRNO(errno.EPERM), name, set_there)
    return rules


def number(seccomp: ModuleType, name: str) -> int:
    """A system call's number. libseccomp has negative ones of its own for those this architecture lacks."""
    found = int(seccomp.resolve_syscall(seccomp.Arch.NATIVE, name))
    return NUMBERS.get(name, found) if found == -1 else found


def refuse_families(seccomp: ModuleType, rules: Any, call: str, allowed: tuple[int, ...]) -> None:
    """Refuses every other family. A rule holds one comparison of an argument, so each gap is spelled out."""
    highest = max(allowed)
    comparisons = [seccomp.Arg(0, seccomp.EQ, family) for family in range(highest) if family not in allowed]
    for comparison in (*comparisons, seccomp.Arg(0, seccomp.GT, highest)):
        rules.add_rule(seccomp.ERRNO(errno.EAFNOSUPPORT), call, comparison)


def compiled(rules: Any) -> bytes:
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
