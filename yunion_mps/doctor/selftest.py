"""`--selftest`: a CUDA program on a device of each domain, and what it was given against its budget."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import TYPE_CHECKING

from yunion_mps.doctor import cuda_client
from yunion_mps.doctor.cuda_client import DeviceProbe, Failure
from yunion_mps.doctor.host import Finding, Findings, Host, SkipError, check, ok, problem, skipped
from yunion_mps.host.proc import uid_of, user_name
from yunion_mps.host.processes import outcome_of
from yunion_mps.mps.processes import server_pids
from yunion_mps.reasons import SELFTEST_FAILED

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceDetails

#: As long as another check: waking a GPU and starting an MPS server take seconds, and a client that waits for
#: another's jobs is to be reported.
_TIMEOUT_FACTOR = 6
#: A piece so much larger than the budget, or the whole, is to be refused.
_OVER_MIB = 64

#: What an error of CUDA's means here (cuda.h), and what to do.
_MEANINGS = {
    -1: ("there is no CUDA driver library", "install the driver's libraries: see the check `programs`"),
    2: ("the budget has no free memory", "see who uses the GPU: yunion-mps who"),
    46: (
        "the GPU is busy or unavailable",
        "see which processes use it outside MPS: nvidia-smi; and check its compute mode",
    ),
    100: ("CUDA finds no GPU", "see: yunion-mps gpus; nvidia-smi -L"),
    101: ("CUDA_VISIBLE_DEVICES names no GPU", "see: yunion-mps gpus"),
    802: ("the NVLink fabric is not up", "systemctl start nvidia-fabricmanager"),
    803: (
        "the library and the kernel module have different versions",
        "finish the driver update, then reboot",
    ),
    804: (
        "the libcuda compatibility package does not support this GPU",
        "remove cuda-compat from LD_LIBRARY_PATH",
    ),
    805: (
        "the MPS server could not be reached",
        "see the checks `control daemon`, `MPS servers` and `/dev/shm`",
    ),
    806: ("the MPS server did not answer", "see the log directory's server.log"),
    807: (
        "the MPS server is not ready",
        "after a fault, it waits for its clients to end; list them: yunion-mps who --clients",
    ),
    808: ("the MPS client limit has been reached", "see: yunion-mps who --clients"),
    809: ("MPS has no free connection", "lower CUDA_DEVICE_MAX_CONNECTIONS, or run fewer clients"),
}
_OTHER_ERROR = ("a CUDA program failed", "see the log directory's server.log")
_NO_GPU = (-1, 100)
#: What of our own environment the program gets.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG")


@check("selftest", SELFTEST_FAILED, times=_TIMEOUT_FACTOR + 1)
def selftest(host: Host) -> Findings:
    """One device of each domain."""
    devices = [one for one in host.devices() if one["state"] == "available" and one["free"]]
    if not devices:
        raise SkipError("no device is free", "see: yunion-mps list")
    seen: set[str] = set()
    for device in devices:
        shown = host.device(device["id"])
        if shown["domain"] not in seen:
            seen.add(shown["domain"])
            yield _tested(host, shown)


def _tested(host: Host, device: DeviceDetails) -> Finding:
    addr = device["addr"]
    other = _other_user(host, device["domain"])
    if other:
        what = f"{addr} was not tested: a client of your user would make new jobs of {other} wait"
        return skipped(what, f"run it as {other}, or while no MPS server is running")
    budget = device["mps_memory_limit"]
    over_mib = min(budget, device["mps_memory_total"]) + _OVER_MIB
    timeout_s = host.timeout_s * _TIMEOUT_FACTOR
    answer = _answer(device["client_environment"], over_mib, timeout_s)
    if answer is None:
        what = f"{addr}: a CUDA program was not served within {timeout_s:g} s"
        hint = (
            "check whether it waits for other jobs (yunion-mps who --clients), and see the control "
            "daemon's log"
        )
        return problem(what, hint)
    if "code" in answer:
        means, hint = _MEANINGS.get(answer["code"], _OTHER_ERROR)
        what = f"{addr}: {means} ({answer['call']}: {answer['name']})"
        return skipped(what, hint) if answer["code"] in _NO_GPU else problem(what, hint)
    return _judged(device, answer)


def _judged(device: DeviceDetails, answer: DeviceProbe) -> Finding:
    budget, percentage = device["mps_memory_limit"], device["mps_thread_percentage"]
    addr, memory = device["addr"], answer["memory_mib"]
    used, all_of = answer["used"], answer["multiprocessors"]
    what = (
        f"{addr} ({answer['name']}): got {memory} MiB of a budget of {budget} MiB, and {used} of "
        f"{all_of or '?'} SMs at {percentage:g} %"
    )
    if answer["mps"] == 0:
        return problem(f"{what}; it was not served by MPS", "see the check `control daemon`")
    if not device["budget_enforced"]:
        return ok(f"{what}; no budget is enforced on this GPU")
    if answer["over_budget"] or memory > budget:
        hint = "see the limits: yunion-mps status; and restart the MPS server: yunion-mps reload"
        return problem(f"{what}; it got more than its budget", hint)
    # Releases differ in whether a client's own count of SMs is already that of its share.
    if all_of and percentage < 100 and math.ceil(all_of * percentage / 100) < used < all_of:
        return problem(f"{what}; it got more than its budget", "see the limits: yunion-mps status")
    return ok(what)


def _other_user(host: Host, domain: str) -> str:
    """The other user whose jobs the domain's server serves; empty if there is none."""
    for one in host.status()["domains"]:
        if one["name"] == domain and one["pid"]:
            for pid in server_pids(one["pid"]):
                uid = uid_of(pid)
                if uid is not None and uid != os.geteuid():
                    return user_name(uid)
    return ""


def _answer(variables: dict[str, str], over_mib: int, timeout_s: float) -> DeviceProbe | Failure | None:
    """What the program prints; None if that does not come in time."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT}
    # Nothing of ours stays in a home directory.
    environment = {**kept, **variables, "CUDA_CACHE_DISABLE": "1"}
    argv = [sys.executable, "-IS", cuda_client.__file__, str(over_mib)]
    status, text = outcome_of(argv, timeout_s, environment=environment)
    if status is None:
        return None
    try:
        answer: DeviceProbe | Failure = json.loads(text)
    except ValueError:
        return {"call": "the program", "code": -3, "name": "it exited without output"}
    return answer
