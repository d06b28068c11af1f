"""System calls that lead past the sandbox's namespaces, as a seccomp filter: a program for the kernel's classic BPF.

Refused: sockets of families that no network namespace holds (AF_VSOCK reaches the hypervisor, and other virtual
machines), io_uring (which makes sockets unseen by a filter), and keyrings (every sandbox would share the launcher's
session keyring, and `request_key` has the kernel run a program outside, which may ask a DNS server). System calls of
another architecture (i386 and x32 on x86-64) would go around the filter and do not exist. `fallocate` is answered as by
a file system that has none: it could take a whole disk at once, while what is written byte by byte can be watched.

Not here: what a namespace or a missing capability forbids already, and bugs in the calls that remain.
"""

from __future__ import annotations

import errno
import functools
import platform
import socket
import struct

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
# AUDIT_ARCH of linux/audit.h; numbers of (socket, socketpair), (add_key, request_key, keyctl, io_uring_setup) and
# fallocate.
ARCHITECTURES = {
    "x86_64": (0xC000003E, (41, 53), (248, 249, 250, 425), 285),
    "aarch64": (0xC00000B7, (198, 199), (217, 218, 219, 425), 47),
}
X32_BIT = 0x40000000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h, on words and constants
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


@functools.cache
def program() -> bytes | None:
    """The filter for bwrap's --seccomp; None on an architecture whose numbers are not known here."""
    if platform.machine() not in ARCHITECTURES:
        return None
    architecture, of_sockets, refused, fallocate = ARCHITECTURES[platform.machine()]
    steps = [instruction(LOAD, ARCHITECTURE), instruction(JUMP_EQUAL, architecture, 1, 0), refuse(errno.ENOSYS)]
    steps += [instruction(LOAD, NUMBER), instruction(JUMP_GREATER_EQUAL, X32_BIT, 0, 1), refuse(errno.ENOSYS)]
    for number in refused:
        steps += [instruction(JUMP_EQUAL, number, 0, 1), refuse(errno.ENOSYS)]
    steps += [instruction(JUMP_EQUAL, fallocate, 0, 1), refuse(errno.EOPNOTSUPP)]
    families = [instruction(JUMP_EQUAL, family, len(FAMILIES) - index) for index, family in enumerate(FAMILIES)]
    check = [instruction(LOAD, FIRST_ARGUMENT), *families, refuse(errno.EAFNOSUPPORT)]
    steps += [instruction(JUMP_EQUAL, number, len(of_sockets) - index) for index, number in enumerate(of_sockets)]
    return b"".join([*steps, instruction(RETURN, ALLOW), *check, instruction(RETURN, ALLOW)])


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """A struct sock_filter; the jumps count instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def refuse(error: int) -> bytes:
    return instruction(RETURN, REFUSE | error)
