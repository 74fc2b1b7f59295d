"""Whether a control program knows how to serve all users at once: found out by asking it.

Programs before 570 turn into a front-end at a flag that they do not know, and versions alone mislead: vendors
carry changes back. So it is started with the flag where nobody sees it, and looked at.
"""

from __future__ import annotations

import os
import select
import time

from yunion_mps.errors import HostError
from yunion_mps.host.processes import Process, spawn
from yunion_mps.mps.control import client_variables, peer_of
from yunion_mps.mps.launch import MULTIUSER
from yunion_mps.mps.ownership import server_path

#: It serves after some milliseconds; a machine under load may need longer.
_DEADLINE_S = 2.0
_LOOK_MS = 5

_known: dict[tuple[str, int, int], bool] = {}


def knows_multiuser(program: str, run_directory: str, deadline_s: float = _DEADLINE_S) -> bool:
    """Whether the program serves with the flag; may wait until the deadline, so it is for threads.

    It is tried in a directory of its own below `run_directory`, whose path must be short, for it holds a
    socket. Raises HostError where it cannot be tried. What was found out is remembered until the
    program changes.
    """
    try:
        info = os.stat(program)
        key = (program, info.st_mtime_ns, info.st_size)
        if key in _known:
            return _known[key]
        knows = _try(program, run_directory, deadline_s)
    except OSError as error:
        raise HostError(f"{program} cannot be tried: {error.strerror}", "look at the file system") from None
    if knows is not None:
        _known[key] = knows
    return knows is True


def _try(program: str, run_directory: str, deadline_s: float) -> bool | None:
    # Not above: the daemon's start would pay several milliseconds for what few hosts ask for.
    import shutil
    import tempfile

    place = tempfile.mkdtemp(prefix="try.", dir=run_directory)
    try:
        variables = {
            **client_variables(place),
            "PATH": server_path(program),
            "CUDA_MPS_LOG_DIRECTORY": place,
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(os.devnull, "r+b") as null:
            output = null.fileno()
            process = spawn([program, "-f", MULTIUSER], variables, stdin=None, stdout=output, stderr=output)
        try:
            return _serves(process, place, deadline_s)
        finally:
            process.kill()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _serves(process: Process, place: str, deadline_s: float) -> bool | None:
    """Whether it serves there; None where it does neither that nor end, until the deadline."""
    end_s = time.monotonic() + deadline_s
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    while time.monotonic() < end_s:
        if process.status() is not None:
            return False
        peer = peer_of(place)
        if peer and peer.pid == process.pid:
            return True
        poll.poll(_LOOK_MS)
    return None
