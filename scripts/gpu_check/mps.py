"""The questions about MPS itself, each with control daemons of its own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from gpu_check.bench import Bench, question
from gpu_check.host import ask_smi
from gpu_check.processes import Client, Control, Event, QuestionError, duration, process_state, wait_for

_SET_LIMIT = "set_default_device_pinned_mem_limit"
_GET_LIMIT = "get_default_device_pinned_mem_limit"
#: A limit that is no whole number of GiB, and those around it, with their MiB.
_LIMITS = {"5760M": 5760, "5G": 5120, "6G": 6144}
#: What CUDA may need of a limit for itself.
_OVERHEAD_MIB = 1024


@question("Does a client run under MPS, how long does it take, and what do lists and logs say?", 60)
def start(bench: Bench) -> None:
    control = bench.control()
    first = bench.client("the first client", "beat", pipe=control.pipe)
    bench.answer(f"{first.describe_start(40)}.")
    second = bench.client("the second client", "beat", pipe=control.pipe)
    bench.answer(f"{second.describe_start(10)}.")
    if not second.events("ready"):
        bench.show("The logs", control.logs())
        raise QuestionError("not even two clients have run a kernel under MPS")
    server = control.server()
    commands = ["get_server_list", "ps", "device_query", "lspart", f"get_device_pinned_mem_limit {server} 0"]
    for command in ("get_server_status", "get_client_list", "get_active_thread_percentage"):
        commands.append(f"{command} {server}")
    bench.answer(f"The clients are {first.pid} and {second.pid}, the control daemon is {control.pid}.")
    bench.show("What it answers", control.transcript(commands))
    first.close()
    second.close()
    wait_for(lambda: process_state(server) != "runs", 3)
    bench.answer(f"3 s after its last client, the server {process_state(server)}.")
    bench.show("The logs", control.logs())
    if not first.events("ready")[0]["mps"]:
        raise QuestionError("the client ran outside MPS, although a control daemon listens")


def _tell_aftermath(bench: Bench, control: Control, server: int) -> None:
    """Say what is left of the server and the control daemon, and what a new client meets."""
    state = control.state()
    status = control.ask(f"get_server_status {server}") if state == "runs" else ""
    bench.answer(f"The control daemon {state}; the server {process_state(server)} (status: {status!r}).")
    bench.answer(f"{bench.new_client(control.pipe)}.")
    bench.show("The logs", control.logs())


@question("What does SIGKILL of a client with kernels under way do to its neighbours?", 40)
def killed_client(bench: Bench) -> None:
    control = bench.control()
    clients = bench.beating(control.pipe, "abc")
    server = control.server()
    since_s = time.monotonic()
    clients[0].process.kill()
    bench.answer(f"After SIGKILL of client a: {bench.fates(clients[1:], since_s, 3)}.")
    _tell_aftermath(bench, control, server)


@question("What does SIGKILL of the control daemon do to clients, and does a new one take them over?", 60)
def killed_control(bench: Bench) -> None:
    control = bench.control()
    clients = bench.beating(control.pipe, "ab")
    server = control.server()
    since_s = time.monotonic()
    os.kill(control.pid, signal.SIGKILL)
    bench.answer(f"After SIGKILL of the control daemon: {bench.fates(clients, since_s, 3)}.")
    bench.answer(f"The server {process_state(server)}; {bench.new_client(control.pipe)}.")
    since_s = time.monotonic()
    started_s = control.start()
    bench.answer(
        f"A new control daemon in the same directory listens after {duration(started_s)} and lists the "
        f"servers {control.servers()}; the old server is {server}."
    )
    bench.answer(f"{bench.new_client(control.pipe)}.")
    bench.answer(f"The old server {process_state(server)}; {bench.fates(clients, since_s, 1)}.")
    for client in clients:
        client.close()
    wait_for(lambda: process_state(server) != "runs", 5)
    bench.answer(f"5 s after its last client, the old server {process_state(server)}.")
    bench.show("The logs", control.logs())


@question("What does SIGKILL of the server do to its clients, and when does a new client run?", 40)
def killed_server(bench: Bench) -> None:
    control = bench.control()
    clients = bench.beating(control.pipe, "ab")
    server = control.server()
    since_s = time.monotonic()
    os.kill(server, signal.SIGKILL)
    bench.answer(f"After SIGKILL of the server: {bench.fates(clients, since_s, 4)}.")
    _tell_aftermath(bench, control, server)


@question("What does `terminate_client` do to the client and to its neighbours?", 40)
def terminate_client(bench: Bench) -> None:
    control = bench.control()
    clients = bench.beating(control.pipe, "abc")
    server = control.server()
    since_s = time.monotonic()
    bench.show("terminate_client", control.transcript([f"terminate_client {server} {clients[0].pid}"]))
    bench.answer(f"{bench.fates(clients, since_s, 3)}.")
    is_listed = str(clients[0].pid) in control.ask(f"get_client_list {server}").split()
    bench.answer(f"The terminated client is {'still' if is_listed else 'not'} in get_client_list.")
    _tell_aftermath(bench, control, server)


@question("What does a fault of one client do to the others, and how does the server recover?", 60)
def fault(bench: Bench) -> None:
    control = bench.control()
    clients = bench.beating(control.pipe, "bc")
    bad = bench.client("the client with the fault", "fault", pipe=control.pipe)
    bad.wait_event("ready")
    server = control.server()
    since_s = time.monotonic()
    bad.tell()
    bench.answer(f"{bench.fates([bad, *clients], since_s, 5)}.")
    _tell_aftermath(bench, control, server)
    for client in (bad, *clients):
        client.close()
    left_s = time.monotonic()
    attempts = 1
    while "ran" not in bench.new_client(control.pipe) and time.monotonic() < left_s + 15:
        attempts += 1
    took = duration(time.monotonic() - left_s)
    bench.answer(f"After the old clients had ended, new ones were tried {attempts} times, in {took}.")
    _tell_aftermath(bench, control, server)


def _tell_end(bench: Bench, command: str, watch_s: float) -> None:
    """Say what a command that ends servers does to two clients."""
    control = bench.control()
    clients = bench.beating(control.pipe, "ab")
    server = control.server()
    since_s = time.monotonic()
    printed = control.ask(command.format(server=server), watch_s)
    bench.answer(f"It printed {printed!r} after {duration(time.monotonic() - since_s)}.")
    bench.answer(f"{bench.fates(clients, since_s, watch_s)}.")
    _tell_aftermath(bench, control, server)


@question("What does `shutdown_server -f` do to running clients?", 40)
def shutdown_now(bench: Bench) -> None:
    _tell_end(bench, "shutdown_server {server} -f", 4)


@question("What does `quit -t 3` do to running clients?", 40)
def quit_timeout(bench: Bench) -> None:
    _tell_end(bench, "quit -t 3", 8)


def measure_memory(client: Client) -> tuple[int, str]:
    """Return what a client in the mode `memory` got, and whether its limit held; raises QuestionError."""
    found = client.wait_event("result", 60)
    client.close()
    limit_mib = found["limit_mib"]
    taken_mib = found["taken_mib"]
    verdict = "held"
    if taken_mib > limit_mib or found["block_above"]:
        verdict = "did NOT hold"
    elif taken_mib < limit_mib - _OVERHEAD_MIB or not found["block_below"]:
        verdict = "was TIGHTER"
    return taken_mib, (
        f"{verdict}: {taken_mib} of {limit_mib} MiB in small blocks (then "
        f"{found['refusal'] or 'no refusal 2 GiB above it'}); one block of {limit_mib + 2} MiB was "
        f"{'given' if found['block_above'] else 'refused'}; the client sees {found['total_mib']} MiB, "
        f"{found['free_mib']} of them free"
    )


@question("Is a default memory limit enforced, and is 5760M enforced as 5760M or as 5G?", 75)
def memory_limit(bench: Bench) -> None:
    taken_mib: dict[str, int] = {}
    for limit, limit_mib in _LIMITS.items():
        control = bench.control(f"{_SET_LIMIT} 0 {limit}", f"{_GET_LIMIT} 0")
        client = bench.client("a client", "memory", pipe=control.pipe, number=limit_mib)
        taken_mib[limit], words = measure_memory(client)
        bench.answer(f"The default limit {limit} for device 0 {words}.")
        control.close()
    more_mib = taken_mib["5760M"] - taken_mib["5G"]
    less_mib = taken_mib["6G"] - taken_mib["5760M"]
    bench.answer(f"5760M gave {more_mib} MiB more than 5G, and {less_mib} less than 6G (exact: 640, 384).")


@question("Does a UUID work as the device of a memory limit?", 40)
def memory_by_uuid(bench: Bench) -> None:
    uuid = bench.host.gpu.get("uuid")
    if not uuid:
        raise QuestionError("the UUID of the GPU is not known without nvidia-smi")
    control = bench.control()
    commands = [f"{_SET_LIMIT} {uuid} 5760M", f"{_GET_LIMIT} {uuid}", f"{_GET_LIMIT} 0"]
    bench.show("A default limit by UUID", control.transcript(commands))
    _, words = measure_memory(bench.client("a client", "memory", pipe=control.pipe, number=5760))
    bench.answer(f"The default limit for the UUID {words}.")
    control = bench.control()
    own = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{uuid}=5760M"}
    client = bench.client("a client", "memory", pipe=control.pipe, number=5760, environment=own)
    _, words = measure_memory(client)
    bench.answer(f"The limit for the UUID in a client's environment {words}.")


def _throughput(bench: Bench, pipe: str, count: int = 1) -> list[Event]:
    """Measure so many clients whose kernels fill the GPU, at the same time."""
    number = bench.host.multiprocessors
    clients = [bench.client("a client", "throughput", pipe=pipe, number=number) for _ in range(count)]
    for client in clients:
        client.wait_event("warm")
    for client in clients:
        client.tell()
    results = [client.wait_event("result") for client in clients]
    for client in clients:
        client.close()
    return results


@question("Is a percentage of the SM threads enforced, and do four clients of 25 % disturb each other?", 75)
def thread_limit(bench: Bench) -> None:
    whole_per_s = 0.0
    for percentage in ("100", "50", "25", "12.5", "10"):
        control = bench.control(f"set_default_active_thread_percentage {percentage}")
        found = _throughput(bench, control.pipe)[0]
        whole_per_s = whole_per_s or found["per_s"]
        share = found["per_s"] / whole_per_s
        held = "held" if share <= float(percentage) / 100 * 1.1 else "did NOT hold"
        sms = f"{found['used']} of {bench.host.multiprocessors} SMs"
        bench.answer(f"{percentage} % {held}: {sms}, {share:.1%} of the throughput at 100 %.")
        if percentage == "25":
            four = _throughput(bench, control.pipe, count=4)
            shares = [f"{each['per_s'] / found['per_s']:.1%}" for each in four]
            bench.answer(f"Four at once: each {', '.join(shares)} of the throughput of one alone.")
        control.close()


@question("What do NVML and nvidia-smi say of clients, their memory and their use of SMs?", 40, "daemon")
def nvml(bench: Bench) -> None:
    import pynvml

    pipe = bench.control().pipe if bench.host.control and bench.host.server else ""
    small = bench.client("client a", "beat", pipe=pipe, number=512)
    large = bench.client("client b", "beat", pipe=pipe, number=1024)
    bench.answer(f"{small.describe_start(10)}; {large.describe_start(10)}.")
    bench.answer(f"Client a ({small.pid}) has 512 MiB, client b ({large.pid}) 1024 MiB.")
    bench.answer(f"{bench.fates([small, large], time.monotonic(), 2)}.")
    for title, arguments in (("nvidia-smi", ""), ("nvidia-smi pmon", "pmon -c 1 -s um")):
        bench.show(title, ask_smi(bench.host, *arguments.split()) or "(missing, or failed)")
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    _show_rows(bench, "nvmlDeviceGetComputeRunningProcesses", gpu)
    _show_rows(bench, "nvmlDeviceGetMPSComputeRunningProcesses", gpu)
    _show_rows(bench, "nvmlDeviceGetProcessUtilization", gpu, 0)


def _show_rows(bench: Bench, call: str, *arguments: Any) -> None:
    """Show the rows that a call of NVML returns, or its error."""
    import pynvml

    try:
        rows = getattr(pynvml, call)(*arguments)
    except pynvml.NVMLError as error:
        rows = [error]
    bench.show(call, "\n".join(str(row) for row in rows) or "(nothing)")


@question("Do 60 clients run at the same time, and what happens to more?", 80)
def sixty_clients(bench: Bench) -> None:
    control = bench.control()
    clients = [bench.client(f"client {index}", "beat", pipe=control.pipe) for index in range(62)]
    wait_for(lambda: all(client.events("beat") or client.is_over() for client in clients), 35)
    took = duration(time.monotonic() - clients[0].started_s)
    ready: list[Client] = []
    complaints: set[str] = set()
    for client in clients:
        if client.events("beat"):
            ready.append(client)
        else:
            complaints.add(client.complaint())
    bench.answer(f"Of {len(clients)} clients started at once, {len(ready)} launched kernels after {took}.")
    bench.answer(f"The others: {'; '.join(sorted(complaints)) or 'none'}.")
    bench.fates(ready, time.monotonic(), 2)
    over = [client.complaint() for client in ready if client.is_over()]
    bench.answer(f"2 s later, {len(ready) - len(over)} of these still did. {'; '.join(over)}")
    listed = control.ask(f"get_client_list {control.server()}").split()
    bench.answer(f"get_client_list has {len(listed)} of them.")
    bench.show("The logs", control.logs(20))
