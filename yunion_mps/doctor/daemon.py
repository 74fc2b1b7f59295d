"""Checks of our own daemon and its configuration files, and `--selftest` of its devices."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from yunion_mps import __version__
from yunion_mps.core.addresses import physical_gpu
from yunion_mps.core.enums import FREE
from yunion_mps.core.errors import DriverError, HostError, Problem, UnreachableError
from yunion_mps.core.models import Gpu, Plan
from yunion_mps.core.reasons import (
    CONTROL_DAEMON_EXITED,
    DAEMON_UNREACHABLE,
    INVALID_CONFIGURATION,
    RELOAD_NEEDED,
    VERSION_DIFFERS,
    hint_of,
)
from yunion_mps.core.text import count, list_of
from yunion_mps.doctor import cuda_client
from yunion_mps.doctor.checks import (
    WHICH_GPUS,
    Finding,
    Findings,
    Host,
    SkipError,
    finding_of,
    host_check,
    invisible,
    ok,
    problem,
    skipped,
    warning,
)
from yunion_mps.doctor.cuda_client import DeviceProbe, Failure
from yunion_mps.host.proc import user_name
from yunion_mps.host.process_info import uid_of
from yunion_mps.host.processes import outcome_of
from yunion_mps.mps.processes import server_pids

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceDetailsJson

_EVENTS = "see what happened: yunion-mps events; journalctl -u yunion-mps-daemon"


#: Several checks' time: waking a GPU and starting an MPS server take seconds, and a client that waits for
#: another's jobs must be reported.
SELFTEST_TIMEOUT_FACTOR = 6
#: An allocation that exceeds the budget, or the GPU, by this much must fail.
_OVER_MIB = 64

#: Meanings of CUDA's errors here (cuda.h), and hints.
_MEANINGS = {
    -1: ("there is no CUDA driver library", "install the driver's libraries: see the check `programs`"),
    2: ("the device's budget has no memory left", "see who uses the GPU: yunion-mps who"),
    46: (
        "the GPU is busy or unavailable",
        "see which processes use it outside MPS: nvidia-smi; and check its compute mode",
    ),
    100: ("CUDA finds no GPU", "see: yunion-mps gpus; nvidia-smi -L"),
    101: ("CUDA_VISIBLE_DEVICES selects no GPU", "see: yunion-mps gpus"),
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
#: Variables of our own environment that the program inherits.
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG")


@host_check("daemon", DAEMON_UNREACHABLE)
def daemon(host: Host) -> Findings:
    try:
        status = host.status()
    except UnreachableError as error:
        config, problems = host.config()
        if config.enable_cuda_mps or problems:
            return [problem(error.message, error.hint)]
        return [ok("not running; enable_cuda_mps is false, so this host offers no devices")]
    if status["state"] == "disabled":
        return [
            ok(f"running ({status['version']}); enable_cuda_mps is false, so this host offers no devices")
        ]
    findings = [finding_of(condition) for condition in host.other_conditions()]
    for domain in status["domains"]:
        if domain["restarts"]:
            times = "once" if domain["restarts"] == 1 else f"{domain['restarts']} times"
            text = f"the control daemon of domain {domain['name']} was restarted {times}"
            findings.append(warning(text, _EVENTS, CONTROL_DAEMON_EXITED))
    if status["version"] != __version__:
        text = f"the daemon runs version {status['version']}, but this command is version {__version__}"
        findings.append(warning(text, hint_of(VERSION_DIFFERS), VERSION_DIFFERS))
    devices = status["devices"]
    summary = f"running; {devices['available']} of {devices['total']} devices available"
    return findings or [ok(summary)]


@host_check("configuration", INVALID_CONFIGURATION)
def configuration(host: Host) -> Findings:
    config, problems = host.config()
    _check_readable(config.files)
    if problems:
        return [_finding(error) for error in problems]
    if not config.enable_cuda_mps:
        return [ok("the configuration is valid; enable_cuda_mps is false")]
    try:
        plan, problems = host.plan()
    except DriverError:
        return [ok("the configuration is valid, but cannot be checked against the GPUs without the driver")]
    except HostError as error:
        return [problem(error.message, error.hint)]
    if problems:
        return [_finding(error) for error in problems]
    return [_describe_plan(host, plan)]


def _describe_plan(host: Host, plan: Plan) -> Finding:
    """Describe what a valid configuration divides."""
    unread = sorted(host.unread_gpus())
    if unread:
        names = list_of(Gpu(address).address for address in unread)
        verb = "is" if len(unread) == 1 else "are"
        text = f"{names} {verb} not divided yet, because the daemon has not read the files since they changed"
        return warning(text, hint_of(RELOAD_NEEDED), RELOAD_NEEDED)
    if host.hides_entries():
        return ok(f"the files have no errors; {invisible(WHICH_GPUS).message}")
    unusable = len(plan.unavailable) + len(plan.missing)
    if not plan.devices and not plan.pools and unusable:  # other checks report why
        return ok(f"the configuration is valid; {count(unusable, 'GPU')} cannot be divided now")
    if not plan.devices and not plan.pools:
        hint = f"check the GPUs (yunion-mps gpus) and {host.config()[0].container_device_config_file}"
        return problem("the configuration is valid, but no GPU on this host can be divided", hint)
    gpus = len({physical_gpu(device.addr) for device in plan.devices})
    parts = [f"{count(len(plan.devices), 'device')} on {count(gpus, 'GPU')}"] if gpus else []
    if plan.pools:
        parts.append(count(len(plan.pools), "memory pool"))
    return ok(f"the configuration is valid; {', '.join(parts)}")


def _check_readable(files: Iterable[str]) -> None:
    for file in files:
        if os.path.exists(file) and not os.access(file, os.R_OK):
            raise invisible(file)


def _finding(error: Problem) -> Finding:
    place = error.file if error.line is None else f"{error.file}:{error.line}"
    return problem(f"{place}: {error.what}", error.hint)


def selftest(host: Host) -> Findings:
    """Run a CUDA program on a device of each domain, and compare what it got with its budget.

    Raises SkipError if no device is free.
    """
    devices = [device for device in host.devices() if device["state"] == FREE]
    if not devices:
        raise SkipError("no device is free", "see: yunion-mps list")
    tested: set[str] = set()
    for device in devices:
        details = host.device(device["id"])
        if details["domain"] not in tested:
            tested.add(details["domain"])
            yield _test(host, details)


def _test(host: Host, device: DeviceDetailsJson) -> Finding:
    addr = device["addr"]
    other = _other_user(host, device["domain"])
    if other:
        text = f"{addr} was not tested: a client of your user would block new jobs of {other}"
        return skipped(text, f"run it as {other}, or while no MPS server is running")
    budget = device["memory_mib"]
    over_mib = min(budget or 0, device["gpu_memory_mib"] or 0) + _OVER_MIB
    timeout_s = host.timeout_s * SELFTEST_TIMEOUT_FACTOR
    answer = _run_client(device["client_environment"], over_mib, timeout_s)
    if answer is None:
        text = f"{addr}: a CUDA program was not served within {timeout_s:g} s"
        hint = (
            "check whether it waits for other jobs (yunion-mps who --clients), and see the control "
            "daemon's log"
        )
        return problem(text, hint)
    if "code" in answer:
        meaning, hint = _MEANINGS.get(answer["code"], _OTHER_ERROR)
        text = f"{addr}: {meaning} ({answer['call']}: {answer['name']})"
        return skipped(text, hint) if answer["code"] in _NO_GPU else problem(text, hint)
    return _compare(device, answer)


def _compare(device: DeviceDetailsJson, answer: DeviceProbe) -> Finding:
    budget_mib = device["memory_mib"]
    percentage = device["thread_percentage"]
    memory_mib = answer["memory_mib"]
    used = answer["used"]
    total = answer["multiprocessors"]
    text = f"{device['addr']} ({answer['name']}): got {memory_mib} MiB of {_budget_text(budget_mib)}, "
    text += f"and {used} of {total or '?'} SMs at {percentage:g} %"
    if answer["mps"] == 0 and device["domain"]:
        return problem(f"{text}; it was not served by MPS", "see the check `control daemon`")
    if not device["budget_enforced"]:
        return ok(f"{text}; no budget is enforced on this GPU")
    if answer["over_budget"] or (budget_mib is not None and memory_mib > budget_mib):
        hint = "see the limits: yunion-mps status; and restart the MPS server: yunion-mps reload"
        return problem(f"{text}; it got more than its budget", hint)
    # Releases differ in whether the number of SMs that a client reports is already its share.
    if total and percentage < 100 and math.ceil(total * percentage / 100) < used < total:
        return problem(f"{text}; it got more than its budget", "see the limits: yunion-mps status")
    return ok(text)


def _budget_text(budget_mib: int | None) -> str:
    return "an unknown budget" if budget_mib is None else f"a budget of {budget_mib} MiB"


def _other_user(host: Host, domain: str) -> str:
    """Return the other user whose jobs the domain's server serves; empty if there is none."""
    for status in host.status()["domains"]:
        if status["name"] == domain and status["pid"]:
            for pid in server_pids(status["pid"]):
                uid = uid_of(pid)
                if uid is not None and uid != os.geteuid():
                    return user_name(uid)
    return ""


def _run_client(variables: dict[str, str], over_mib: int, timeout_s: float) -> DeviceProbe | Failure | None:
    """Return what the program prints; None if that takes longer than `timeout_s`."""
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED}
    # Leave no cache in a home directory.
    environment = {**inherited, **variables, "CUDA_CACHE_DISABLE": "1"}
    argv = [sys.executable, "-IS", cuda_client.__file__, str(over_mib)]
    status, text = outcome_of(argv, timeout_s, environment=environment)
    if status is None:
        return None
    try:
        answer: DeviceProbe | Failure = json.loads(text)
    except ValueError:
        return {"call": "the test program", "code": -3, "name": "exited without output"}
    return answer
