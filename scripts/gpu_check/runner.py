"""Run the steps, each in its own process with a deadline, so that none can affect the next."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from gpu_check.processes import die_with_parent, end_all, reap
from gpu_check.values import Host, Report, Step, StepContext, StepError, StepSkipped, seconds

#: How long a step that was told to stop may take to end what it started.
_GRACE_S = 8.0
#: A step is not started if less time than this is left.
_LEAST_S = 3.0

Result = dict[str, Any]


class _ToldToStop(BaseException):
    """The step was told to stop; only cleanup may catch this."""


def run_steps(
    steps: Sequence[Step], host: Host, directory: str, end_s: float, save: Callable[[list[Result]], None]
) -> list[Result]:
    """Run all steps until `end_s` (monotonic seconds); call `save` with the results so far after each."""
    results: list[Result] = []
    for step in steps:
        start_s = time.monotonic()
        allowed_s = min(step.deadline_s, end_s - start_s - _GRACE_S)
        result = _new_result(step)
        results.append(result)
        try:
            reason = missing_for(step, host)
            if reason:
                result.update(status="skipped", reason=reason)
            elif allowed_s < _LEAST_S:
                result.update(status="not run", reason="the time limit of the whole run was reached")
            else:
                _run_one(step, host, directory, start_s + allowed_s, result)
        finally:
            result["seconds"] = round(time.monotonic() - start_s, 2)
            _show(step, result)
            save(results)
    return results


def missing_for(step: Step, host: Host) -> str:
    """Why the step cannot run on this host; empty if it can."""
    if "unusable" in host.gpu:
        return f"the GPU cannot be used: {host.gpu['unusable']}"
    programs = {"nvidia-cuda-mps-control": host.control, "nvidia-cuda-mps-server": host.server}
    missing = [name for name, path in programs.items() if not path]
    if "mps" in step.needs and missing:
        return f"{' and '.join(missing)} not found"
    if host.settings.get("compute_mode") == "Prohibited":
        return "the GPU's compute mode is Prohibited, which allows no clients"
    if "default_mode" in step.needs and not host.default_mode:
        return (
            f"in compute mode {host.settings['compute_mode']}, only one process can use the GPU without MPS"
        )
    if "root" in step.needs and os.geteuid() != 0:
        return "root is required to run clients as other users"
    return ""


def _new_result(step: Step) -> Result:
    return {
        "name": step.name,
        "status": "failed",
        "reason": "it was interrupted",
        "seconds": 0.0,
        "answers": {},
        "tables": [],
        "verbatim": [],
        "raw": {},
        "left_behind": [],
    }


def _run_one(step: Step, host: Host, directory: str, end_s: float, result: Result) -> None:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    start_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _in_child(step, StepContext(host, directory, end_s), Report(writing))
    os.close(writing)
    status: int | None = None
    try:
        status = _listen(pid, reading, end_s, result)
        if status is None:
            reason = f"it did not finish within {seconds(end_s - start_s)}"
            result.update(status="timed out", reason=reason)
        elif result["reason"] == "it was interrupted":
            result["reason"] = f"its process exited with status {status} and no message"
    finally:
        os.close(reading)
        if status is None:
            _end(pid)
        result["left_behind"] = end_all(directory)


def _in_child(step: Step, context: StepContext, report: Report) -> None:
    """Run the step, then end this process, whatever happens."""
    try:
        die_with_parent()
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(2, 1)
        try:
            step.run(context, report)
        except StepSkipped as error:
            report.end("skipped", str(error))
        except StepError as error:
            report.end("failed", str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this step's result
            report.raw("traceback", traceback.format_exc())
            report.end("failed", f"{type(error).__name__}: {error}")
        else:
            report.end("done", "")
    except BaseException:  # noqa: BLE001 - told to stop; its results so far have been reported
        os._exit(1)
    os._exit(0)


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _ToldToStop


def _listen(pid: int, reading: int, end_s: float, result: Result) -> int | None:
    """Collect what the step reports until it ends; returns its exit status, or None at the deadline."""
    buffer = b""
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([reading], [], [], min(left_s, 0.1))[0]:
            part = os.read(reading, 65536)
            *lines, buffer = (buffer + part).split(b"\n")
            for line in lines:
                kind, value = json.loads(line)
                _note(kind, value, result)
            if not part:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            _reap_others(pid)
    return None


def _reap_others(pid: int) -> None:
    """Reap orphans that became our children, but not the step itself."""
    with contextlib.suppress(ChildProcessError):
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == pid:
                return
            os.waitpid(found.si_pid, 0)


def _note(kind: str, value: Any, result: Result) -> None:
    if kind == "answer":
        result["answers"][value[0]] = value[1]
    elif kind == "raw":
        result["raw"][value[0]] = value[1]
    elif kind == "table":
        result["tables"].append(value)
    elif kind == "verbatim":
        result["verbatim"].append(value)
    elif kind == "end":
        result.update(status=value[0], reason=value[1])


def _end(pid: int) -> None:
    """Tell the step to stop, and end it if it does not."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S - 2), (signal.SIGKILL, 2.0)):
        with contextlib.suppress(OSError):
            os.kill(pid, number)
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s:
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    return
            except ChildProcessError:
                return
            time.sleep(0.01)  # a poll: waitpid() has no timeout
    reap()


def _show(step: Step, result: Result) -> None:
    reason = f": {result['reason']}" if result["reason"] else ""
    print(
        f"{result['seconds']:7.1f} s  {step.name:<22} {result['status']}{reason}", file=sys.stderr, flush=True
    )
