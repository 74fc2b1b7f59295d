"""A driver of Ray that tests tell what to do: it runs each line of its input, a JSON string of Python code.

It answers with a line of JSON: the value if the code is an expression, or the error if there is one. It runs
in the engines' virtual environment; its arguments are the cluster's address, and where to find yunion_mps.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Ray prints there, too
sys.path += sys.argv[2:]

import ray  # noqa: E402
import yunion_mps.ray  # noqa: E402
from ray._private import services  # noqa: E402

services.get_node_ip_address = lambda address=None: "127.0.0.1"  # otherwise the machine's own
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")


def here() -> str:
    """The node of this process, and its device: `1/00:06.0-2`."""
    return f"{os.environ['NODE']}/{os.environ.get('YUNION_MPS_DEVICE')}"


class Actor:
    def here(self) -> str:
        return here()

    def pid(self) -> int:
        return os.getpid()

    def variables(self) -> dict[str, str]:
        return dict(os.environ)

    def call(self, task: Any) -> Any:
        return ray.get(task.remote())


def on(node: int) -> dict[str, Any]:
    """The options of a task with a device on this node."""
    options = yunion_mps.ray.options()
    options["resources"][f"node{node}"] = 1
    return options


def actor(**options: Any) -> Any:
    return ray.remote(num_cpus=0, **options)(Actor).remote()


def task(**options: Any) -> Any:
    return ray.remote(num_cpus=0, **options)(here)


def is_done(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0.5)[0])


for line in sys.stdin:
    code, answer = json.loads(line), {}
    try:
        try:
            answer["value"] = eval(code)
        except SyntaxError:
            exec(code)
    except Exception as error:  # noqa: BLE001 - for the test
        answer["error"] = f"{code}: {error!r}"
    print(json.dumps(answer), file=answers, flush=True)
