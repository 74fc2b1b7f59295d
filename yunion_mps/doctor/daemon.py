"""Checks of our own daemon and its two files."""

from __future__ import annotations

import os

from yunion_mps import __version__
from yunion_mps.doctor.checks import Finding, Findings, Host, check, invisible, ok, problem, warning
from yunion_mps.enums import WARNING
from yunion_mps.errors import DriverError, HostError, Problem, UnreachableError
from yunion_mps.mps.states import READY
from yunion_mps.reasons import (
    BUDGET_NOT_ENFORCED,
    CLIENT_WAITING,
    COMPUTE_MODE_CHANGED,
    CONTROL_DAEMON_EXITED,
    DAEMON_UNREACHABLE,
    INVALID_CONFIGURATION,
    LIMITS_PENDING,
    VERSION_DIFFERS,
    hint_of,
)
from yunion_mps.units import count

#: Warnings about single GPUs and processes, which other checks report in more detail.
_CHECKED_ELSEWHERE = (BUDGET_NOT_ENFORCED, COMPUTE_MODE_CHANGED, CLIENT_WAITING)
_EVENTS = "see what happened: yunion-mps events; journalctl -u yunion-mps-daemon"


@check("daemon", DAEMON_UNREACHABLE)
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
    found = [problem(status["notice"], _EVENTS, status["notice_code"])] if status["notice"] else []
    for domain in status["domains"]:
        name = domain["name"]
        if domain["state"] != READY:
            what = f"domain {name} is {domain['state']}: {domain['reason']}"
            found.append(problem(what, _EVENTS, domain["reason_code"]))
        if domain["pending"]:
            hint = "wait for the jobs: yunion-mps reload --drain; or end them: yunion-mps reload --now"
            found.append(warning(f"domain {name}: {domain['pending']}", hint, LIMITS_PENDING))
        if domain["restarts"]:
            times = "once" if domain["restarts"] == 1 else f"{domain['restarts']} times"
            what = f"the control daemon of domain {name} was restarted {times}"
            found.append(warning(what, _EVENTS, CONTROL_DAEMON_EXITED))
    found += [
        warning(other["text"], other["hint"], other["code"])
        for other in status["problems"]
        if other["level"] == WARNING and other["code"] not in _CHECKED_ELSEWHERE
    ]
    if status["version"] != __version__:
        what = f"the daemon runs version {status['version']}, but this command is version {__version__}"
        found.append(warning(what, hint_of(VERSION_DIFFERS), VERSION_DIFFERS))
    devices = status["devices"]
    summary = f"running; {devices['available']} of {devices['total']} devices available"
    return found or [ok(summary)]


@check("configuration", INVALID_CONFIGURATION)
def configuration(host: Host) -> Findings:
    paths = host.paths
    if os.path.exists(paths.host_conf) and not os.access(paths.host_conf, os.R_OK):
        raise invisible(paths.host_conf)
    config, problems = host.config()
    if problems:
        return [_finding(error) for error in problems]
    if not config.enable_cuda_mps:
        return [ok("both files are valid; enable_cuda_mps is false")]
    try:
        plan, problems = host.plan()
    except DriverError:
        return [ok("both files are valid; they cannot be checked against the GPUs without the driver")]
    except HostError as error:
        return [problem(error.message, error.hint)]
    if problems:
        return [_finding(error) for error in problems]
    if not plan.devices and not plan.pools and plan.unavailable:  # other checks report why
        return [ok(f"both files are valid; {count(len(plan.unavailable), 'GPU')} cannot be divided now")]
    if not plan.devices and not plan.pools:
        hint = f"check the GPUs (yunion-mps gpus) and {config.container_device_config_file}"
        return [problem("both files are valid, but no GPU on this host can be divided", hint)]
    gpus = len({device.gpu_uuid for device in plan.devices})
    parts = [f"{count(len(plan.devices), 'device')} on {count(gpus, 'GPU')}"] if gpus else []
    if plan.pools:
        parts.append(f"memory in units on {count(len(plan.pools), 'GPU')}")
    return [ok(f"both files are valid; {', '.join(parts)}")]


def _finding(error: Problem) -> Finding:
    place = error.file if error.line is None else f"{error.file}:{error.line}"
    return problem(f"{place}: {error.what}", error.hint)
