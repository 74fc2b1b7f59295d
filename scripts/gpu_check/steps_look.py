"""A control daemon with running clients: what it, NVML and /proc report."""

from __future__ import annotations

import os
import time

from gpu_check import host as driver
from gpu_check.clients import Client, start_beating
from gpu_check.processes import Control, all_pids, name_of, names, stat_of
from gpu_check.values import Report, Step, StepContext, seconds

#: How long a server without clients is watched.
_IDLE_S = 10.0


def observe(context: StepContext, report: Report) -> None:
    """Start two clients, inspect everything, and end them."""
    with Control(context).start() as control:
        with Client(context, "a", pipe=control.pipe) as first:
            event = first.ready(60)
            with Client(context, "b", pipe=control.pipe) as second:
                also = second.ready(30)
                report.raw("start_s", {"control": control.start_seconds})
                server_s, second_s = event["t"] - first.started_s, also["t"] - second.started_s
                report.answer(
                    "start",
                    f"The control daemon was listening after {seconds(control.start_seconds)}. The first "
                    f"client, for which the server is started, had run a kernel after {seconds(server_s)}, "
                    f"the second after {seconds(second_s)} (both including the start of Python).",
                )
                told = {True: "Yes", False: "No", None: "This driver does not report it"}[event["mps"]]
                report.answer("attribute", f"{told} (device attribute MPS_ENABLED).")
                start_beating([first, second], context)
                server = _parents(report, control)
                _answers(report, control, server, first.pid)
                _listed(context, report, control, [first.pid, second.pid])
                _counted(context, report, control, [first.pid, second.pid])
        _idle(report, control, server)
        report.verbatim("All logs of this control daemon and its server", control.logs())


def _parents(report: Report, control: Control) -> int:
    server = control.the_server()
    stat = stat_of(server)
    parent = stat.parent if stat else 0
    others = [pid for pid in all_pids() if names(pid, control.pipe) and stat_of(pid)]
    report.raw(
        "processes",
        [{"pid": pid, "name": name_of(pid), "stat": stat_of(pid)} for pid in others],
    )
    relation = "a child of the control daemon" if parent == control.pid else f"a child of {name_of(parent)!r}"
    report.answer("parent", f"The server is {relation} and runs as uid {stat.uid if stat else '?'}.")
    return server


def _answers(report: Report, control: Control, server: int, client: int) -> None:
    commands = (
        "get_server_list",
        f"get_server_status {server}",
        f"get_client_list {server}",
        f"get_device_client_list {server}",
        "get_device_client_list",
        "ps",
        f"ps -p {server}",
        f"get_active_thread_percentage {server}",
        f"get_device_pinned_mem_limit {server} 0",
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 0",
        "get_default_client_priority",
        "device_query",
        "lspart",
    )
    answers = [control.ask(command, timeout_s=3) for command in commands]
    report.raw("answers", [answer._asdict() for answer in answers])
    shown = "\n".join(f"> {answer.command}\n{answer.words()}" for answer in answers)
    numbers = f"server {server}, control daemon {control.pid}, a client {client}"
    report.verbatim(f"What the control daemon answers with two live clients ({numbers})", shown)
    unknown = [a.command.split()[0] for a in answers if "unknown command" in a.text.lower()]
    silent = [a.command for a in answers if a.status is None]
    report.answer(
        "lists",
        f"The answers to all {len(answers)} commands are below. Unknown commands: "
        f"{', '.join(unknown) or 'none'}. Commands without an answer: {', '.join(silent) or 'none'}.",
    )


def _listed(context: StepContext, report: Report, control: Control, clients: list[int]) -> None:
    host = context.host
    table = driver.smi(host, "--query-compute-apps=pid,process_name,used_memory", "--format=csv")
    whole = driver.smi(host)
    report.verbatim(
        "nvidia-smi --query-compute-apps with two live clients",
        table or "(no output, or nvidia-smi is missing)",
    )
    report.verbatim("nvidia-smi with two live clients", whole or "(no output, or nvidia-smi is missing)")
    listed = {line.split(",")[0].strip() for line in table.splitlines()[1:]}
    inside = [str(pid) for pid in clients if str(pid) in listed]
    servers = [str(pid) for pid in control.servers if str(pid) in listed]
    report.raw("listed", {"table": table, "clients": clients, "servers": sorted(control.servers)})
    report.answer(
        "nvml",
        f"nvidia-smi lists {len(listed)} compute processes, with the PIDs of {len(inside)} of 2 clients and "
        f"{len(servers)} of {len(control.servers)} servers"
        + (" (type M+C in its table)." if "M+C" in whole else "."),
    )


def _counted(context: StepContext, report: Report, control: Control, clients: list[int]) -> None:
    """For which processes the driver reports SM utilization (nvmlDeviceGetProcessUtilization)."""
    table = driver.smi(context.host, "pmon", "-c", "1", "-s", "u")
    report.verbatim("nvidia-smi pmon with two live clients", table or "(no output, or nvidia-smi is missing)")
    rows = [line.split() for line in table.splitlines() if line.strip() and not line.startswith("#")]
    told = {row[1]: row[3] for row in rows if len(row) > 3 and row[3].isdigit()}
    inside = [f"{told[str(pid)]} %" for pid in clients if str(pid) in told]
    servers = [f"{told[str(pid)]} %" for pid in control.servers if str(pid) in told]
    report.answer(
        "utilization",
        f"nvidia-smi pmon reports it for {len(inside)} of 2 clients ({', '.join(inside) or 'none'}) and for "
        f"{len(servers)} of {len(control.servers)} servers ({', '.join(servers) or 'none'}).",
    )


def _idle(report: Report, control: Control, server: int) -> None:
    """Whether the server exits after its last client."""
    start_s = time.monotonic()
    while stat_of(server) and time.monotonic() < start_s + _IDLE_S:
        time.sleep(0.05)  # a poll: it is not our child, and cannot be waited for
    waited = seconds(time.monotonic() - start_s)
    if stat_of(server):
        sentence = f"No: it was still running {waited} after its last client had ended."
    else:
        sentence = f"Yes: it had exited {waited} after its last client."
    report.answer("idle", sentence)
    status = control.ask(f"get_server_status {server}", timeout_s=3)
    report.raw("idle", {"alive": bool(stat_of(server)), "status": status._asdict(), "uid": os.geteuid()})


STEPS = (
    Step(
        "look",
        "A control daemon with running clients",
        observe,
        75,
        (
            ("start", "How long until a client runs?"),
            ("attribute", "Does the driver tell a client that it is under MPS?"),
            ("parent", "Which process is the server's parent?"),
            ("lists", "What does the control daemon answer?"),
            ("nvml", "Which processes does NVML list?"),
            ("utilization", "For which processes does NVML report SM utilization?"),
            ("idle", "Does the server exit by itself when its last client ends?"),
        ),
        frozenset({"mps"}),
    ),
)
