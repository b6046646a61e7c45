"""The system call filter of a sandbox: a seccomp program that refuses what no judged program needs, as bubblewrap takes it.

Refused with EPERM: tracing and reading other processes, namespaces and mounts (a tmpfs of one's own has no size limit), memory that is
charged to no process (memfd, System V and POSIX queues and segments), keyrings, io_uring, BPF, performance counters, userfaultfd, kernel
modules, clocks and host names. `clone3` does not exist (ENOSYS), because a filter cannot see its flags: C libraries then use `clone`, which
is refused when it asks for a namespace. Programs of another architecture on the same kernel are killed. Numbers from the kernel's tables
(x86_64: syscall_64.tbl; aarch64: asm-generic/unistd.h); other machines have no filter, and the sandbox refuses them.
"""

import errno
import platform
import struct

_X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
    "pivot_root": 155, "chroot": 161, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "memfd_create": 319, "keyctl": 250,
    "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "init_module": 175, "finit_module": 313,
    "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "vhangup": 153, "personality": 135, "sethostname": 170, "setdomainname": 171,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "syslog": 103, "clone": 56,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39,
    "pivot_root": 41, "chroot": 51, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "memfd_create": 279, "keyctl": 219,
    "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "init_module": 105, "finit_module": 273,
    "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89, "quotactl": 60,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "vhangup": 58, "personality": 92, "sethostname": 161, "setdomainname": 162,
    "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266, "syslog": 116, "clone": 220,
}  # fmt: skip
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "clone3": 435,
}  # fmt: skip
"""Newer calls have one number on every architecture."""
MACHINES: dict[str, tuple[int, dict[str, int]]] = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
"""`platform.machine()` -> audit architecture and call numbers."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # of struct seccomp_data, little-endian
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_X32_BIT = 0x40000000
# NEWTIME shares its bit with the exit signal and works in clone3 and unshare alone.
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The compiled filter (8 bytes an instruction) for a machine, this one by default; None for a machine that is not known."""
    if (machine or platform.machine()) not in MACHINES:
        return None
    architecture, numbers = MACHINES[machine or platform.machine()]
    calls = {**numbers, **_EVERYWHERE}
    clone, clone3 = calls.pop("clone"), calls.pop("clone3")
    refused = sorted(calls.values())
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    # Every test that hits jumps to the refusal, which stands after the tests and four more instructions.
    tests = [(_AT_LEAST, _X32_BIT), *((_EQUAL, number) for number in refused)]
    for i, (test, number) in enumerate(tests):
        program.append((test, len(tests) - i - 1 + 6, 0, number))
    program += [
        (_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 2, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 1, 0, _NAMESPACES),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
