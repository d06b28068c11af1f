"""`python3 tests/container.py UID COMMAND…` as root: runs a command under what an ordinary Docker container imposes.

Docker's defaults, as far as they concern sandboxes: its 14 capabilities and no others, its seccomp
profile where that refuses namespaces, mounts and looking into the kernel to whoever lacks CAP_SYS_ADMIN, and no cgroup
to write. The refusals are the kernel's own. Another UID than 0 is what `docker run --user` gives.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

import pyseccomp as seccomp
from unprivileged import CLONE_NEWNS, libc, uncover

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod,
# audit_write, setfcap
KEPT = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
LAST_CAPABILITY, PR_CAPBSET_DROP, CAPABILITY_VERSION = 40, 24, 0x20080522
NAMESPACES = 0x7E020000
REFUSED = (
    *("mount", "umount2", "pivot_root", "setns", "unshare", "move_mount", "open_tree", "fsopen", "fsmount", "fspick"),
    *("fsconfig", "bpf", "perf_event_open", "fanotify_init", "quotactl", "open_by_handle_at", "userfaultfd", "syslog"),
    *("add_key", "keyctl", "request_key", "init_module", "finit_module", "kexec_load", "reboot", "swapon", "acct"),
    *("sethostname", "setdomainname", "io_uring_setup"),
)


def load_profile() -> None:
    profile = seccomp.SyscallFilter(seccomp.ALLOW)
    profile.set_attr(seccomp.Attr.CTL_NNP, 0)
    for name in REFUSED:
        profile.add_rule(seccomp.ERRNO(errno.EPERM), name)
    profile.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    for flag in (1 << bit for bit in range(32) if NAMESPACES & 1 << bit):
        profile.add_rule(seccomp.ERRNO(errno.EPERM), "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    profile.load()


def drop_capabilities() -> None:
    for capability in set(range(LAST_CAPABILITY + 1)) - KEPT:
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"capability {capability}")
    low = sum(1 << capability for capability in KEPT)
    header, data = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)(low, low, 0, 0, 0, 0)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def main() -> None:
    uid, command = int(sys.argv[1]), sys.argv[2:]
    uncover()
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/sys/fs/cgroup", b"tmpfs", 1, None) != 0:
        raise OSError(ctypes.get_errno(), "/sys/fs/cgroup")
    load_profile()
    drop_capabilities()
    if uid != 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
