"""Become the server: drop to its account, ask to end with the owner, then execute it.

Run by path in a bare interpreter (`python -I -S launch.py OWNER SIGNAL ACCOUNT COMMAND…`) and therefore importing
the standard library only. A process of its own, because code between fork and exec is unsafe in a threaded owner.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    """Execute COMMAND as ACCOUNT (`uid:gid`, or `-` to stay); SIGNAL reaches it when OWNER (a pid) dies."""
    owner, signal, account, *command = argv
    if account != "-":
        _become(account)
    # After the change of account, which clears the request.
    _end_with_owner(int(owner), int(signal))
    os.umask(0o077)
    os.execv(command[0], command)


def _become(account: str) -> None:
    uid, gid = (int(part) for part in account.split(":"))
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def _end_with_owner(owner: int, signal: int) -> None:
    if not sys.platform.startswith("linux"):
        return  # elsewhere the next start clears away what a killed owner left
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal)
    if os.getppid() != owner:
        sys.exit(f"the owner (pid {owner}) ended before its server began")


if __name__ == "__main__":
    main(sys.argv[1:])
