"""How long it takes until a client runs again if nothing but this program restarts the control daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

from gpu_check.clients import Client, attempt
from gpu_check.processes import Control, stat_of
from gpu_check.steps_memory import Sizes
from gpu_check.values import Report, Step, StepContext, StepSkipped, seconds

_FRAMEWORK = """
import json, sys
import torch
def had(mib):
    try:
        torch.empty(mib << 20, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        return True
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.empty_cache()
limit = int(sys.argv[1])
print(json.dumps({"torch": torch.__version__, "below": had(limit * 3 // 4), "above": had(limit + 2)}))
"""


def bare(context: StepContext, report: Report) -> None:
    """Kill a control daemon without clients and start another at once, three times."""
    control = Control(context).start()
    first = attempt(context, control.pipe, 20)
    second = attempt(context, control.pipe, 20)
    report.raw("before", {"first": first.as_json(), "second": second.as_json()})
    times: list[float] = []
    tries: list[dict[str, Any]] = []
    for _ in range(3):
        servers = control.server_pids()
        since_s = time.monotonic()
        control.signal(signal.SIGKILL)
        assert control.process is not None
        control.process.wait(5)
        control = control.successor().start()
        listening_s = time.monotonic() - since_s
        met = attempt(context, control.pipe, 15)
        tries.append(
            {
                "listening_s": round(listening_s, 4),
                "old_servers": servers,
                "old_servers_live": [pid for pid in servers if stat_of(pid)],
                "new_client": met.as_json(),
                "all_s": round(time.monotonic() - since_s, 3),
            }
        )
        if met.works:
            times.append(listening_s + met.waited_s)
    report.raw("tries", tries)
    report.verbatim("Logs of the last one", control.logs(40))
    control.end()
    if not times:
        words = tries[-1]["new_client"]["words"]
        report.answer("bare", f"No new client could run after SIGKILL and a restart: it {words}.")
        return
    listening = min(each["listening_s"] for each in tries)
    live = "kept running" if any(each["old_servers_live"] for each in tries) else "exited as well"
    report.answer(
        "bare",
        f"From SIGKILL until a new client had run a kernel: {', '.join(seconds(value) for value in times)}. "
        f"The new control daemon was listening after {seconds(listening)} at best; the rest is the start of "
        f"a server and a client (before the kill: {seconds(first.waited_s)} for both, "
        f"{seconds(second.waited_s)} for a client alone). The old server, which had no clients, {live}.",
    )


def framework(context: StepContext, report: Report) -> None:
    """Measure a memory limit with PyTorch as the client."""
    probe = [
        sys.executable,
        "-c",
        "import importlib.util as u; raise SystemExit(u.find_spec('torch') is None)",
    ]
    if subprocess.run(probe, stderr=subprocess.DEVNULL, timeout=20).returncode:
        raise StepSkipped("PyTorch is not installed")
    sizes = Sizes(int(context.host.gpu["memory_mib"]))
    with Control(context).start() as control:
        environment = {
            **context.host.environment,
            "CUDA_MPS_PIPE_DIRECTORY": control.pipe,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={sizes.odd}",
        }
        argv = [sys.executable, "-c", _FRAMEWORK, str(sizes.mib[sizes.odd])]
        result = subprocess.run(
            argv, capture_output=True, text=True, env=environment, timeout=max(5.0, context.left_s() - 10)
        )
        control.server_pids()
    report.raw(
        "torch", {"status": result.returncode, "output": result.stdout, "errors": result.stderr[-2000:]}
    )
    found = json.loads(result.stdout.splitlines()[-1])
    below = "was allocated" if found["below"] is True else f"was refused ({found['below']})"
    above = "was allocated" if found["above"] is True else f"was refused ({found['above']})"
    report.answer(
        "torch",
        f"PyTorch {found['torch']} with a limit of {sizes.odd}: a tensor of three quarters of it {below}, "
        f"one that exceeds it by 2 MiB {above}.",
    )


def cold(context: StepContext, report: Report) -> None:
    """Start a client outside MPS, for comparison."""
    times = []
    for number in range(3):
        with Client(context, f"cold {number}") as client:
            times.append(client.ready(30)["t"] - client.started_s)
    report.raw("times", times)
    report.answer(
        "outside",
        f"A client outside MPS had run a kernel after {', '.join(seconds(value) for value in times)}.",
    )


STEPS = (
    Step(
        "recovery",
        "Recovery without yunion-mps-daemon",
        bare,
        60,
        (("bare", "How long does it take from SIGKILL until a client runs with a new control daemon?"),),
        frozenset({"mps"}),
    ),
    Step(
        "outside",
        "A client outside MPS",
        cold,
        30,
        (("outside", "How long does a client take to start outside MPS?"),),
    ),
    Step(
        "framework",
        "PyTorch as the client",
        framework,
        90,
        (("torch", "Is a memory limit enforced for PyTorch?"),),
        frozenset({"mps"}),
    ),
)
