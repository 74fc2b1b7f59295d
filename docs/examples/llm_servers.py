"""Several LLM servers that share one GPU, each within its budget: llm_servers.py NUMBER COMMAND [ARG]...

For example two servers of llama.cpp, on ports 8000 and 8001:

    python llm_servers.py 2 llama-server --model model.gguf --gpu-layers 99 --port '{port}'

If one server ends, the others are stopped, and all devices are released.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

from yunion_mps import Client
from yunion_mps.client import HeldLease, YunionError


def main(number: int, command: list[str]) -> int:
    """Run the servers; returns the exit status of the first that ends."""
    client = Client(on_message=print)
    with ExitStack() as stack:
        leases: list[HeldLease] = []
        servers: list[subprocess.Popen[bytes]] = []
        for port in range(8000, 8000 + number):
            gpu = leases[0].gpus[0] if leases else None  # all on the GPU of the first
            lease = stack.enter_context(client.lease(gpu=gpu, wait_s=60))
            leases.append(lease)
            argv = [part.replace("{port}", str(port)) for part in command]
            servers.append(stack.enter_context(subprocess.Popen(argv, env=lease.environ())))
            stack.callback(servers[-1].terminate)
            print(f"port {port}: {lease.devices[0]} with {lease.memory_mib} MiB", flush=True)
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)  # a poll: no call waits for the first of several processes
        return next(server.returncode for server in servers if server.returncode is not None)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        sys.exit("usage: llm_servers.py NUMBER COMMAND [ARG]...")
    try:
        sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
    except YunionError as error:
        sys.exit(f"{error.message} [{error.code}]\n{error.hint}")
