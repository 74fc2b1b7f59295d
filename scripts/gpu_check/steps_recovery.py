"""How long until a client runs again, if only this program starts the control daemon again."""

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
from gpu_check.values import Report, Skip, Step, Surroundings, seconds

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


def bare(around: Surroundings, report: Report) -> None:
    """SIGKILL of a control daemon without clients, then another one at once, three times."""
    control = Control(around).start()
    first = attempt(around, control.pipe, 20)
    second = attempt(around, control.pipe, 20)
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
        met = attempt(around, control.pipe, 15)
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
        report.answer("bare", f"A new client never ran after SIGKILL and a new start: it {words}.")
        return
    listening = min(each["listening_s"] for each in tries)
    live = "lived on" if any(each["old_servers_live"] for each in tries) else "was gone with it"
    report.answer(
        "bare",
        f"From SIGKILL until a new client had run a kernel: {', '.join(seconds(value) for value in times)}; "
        f"the new control daemon listened after {seconds(listening)} at best, the rest is the start of a "
        f"server and a client (before it: {seconds(first.waited_s)} for both, {seconds(second.waited_s)} "
        f"for a client of a server that ran). The old server, which had no client, {live}.",
    )


def framework(around: Surroundings, report: Report) -> None:
    """The same limit for a client that is PyTorch."""
    probe = [
        sys.executable,
        "-c",
        "import importlib.util as u; raise SystemExit(u.find_spec('torch') is None)",
    ]
    if subprocess.run(probe, stderr=subprocess.DEVNULL, timeout=20).returncode:
        raise Skip("PyTorch is not installed")
    sizes = Sizes(int(around.host.gpu["memory_mib"]))
    with Control(around).start() as control:
        environment = {
            **around.host.environment,
            "CUDA_MPS_PIPE_DIRECTORY": control.pipe,
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={sizes.odd}",
        }
        argv = [sys.executable, "-c", _FRAMEWORK, str(sizes.mib[sizes.odd])]
        result = subprocess.run(
            argv, capture_output=True, text=True, env=environment, timeout=max(5.0, around.left_s() - 10)
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
        f"PyTorch {found['torch']} under a limit of {sizes.odd}: a tensor of three quarters of it {below}, "
        f"one of 2 MiB more than it {above}.",
    )


def cold(around: Surroundings, report: Report) -> None:
    """The start of a client outside MPS, for comparison."""
    times = []
    for number in range(3):
        with Client(around, f"cold {number}") as client:
            times.append(client.ready(30)["t"] - client.started_s)
    report.raw("times", times)
    report.answer(
        "outside", f"A client outside MPS ran after {', '.join(seconds(value) for value in times)}."
    )


STEPS = (
    Step(
        "recovery",
        "Recovery without our daemon",
        bare,
        60,
        (("bare", "How long from the control daemon's SIGKILL until a new client runs on a new one?"),),
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
        "A client that is a framework",
        framework,
        90,
        (("torch", "Is the limit enforced for PyTorch?"),),
        frozenset({"mps"}),
    ),
)
