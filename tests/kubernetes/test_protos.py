"""The generated code of messages, and the methods that are declared beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FileDescriptor
from yunion_mps.kubernetes.kubelet import device_plugin_api, dra_api, pod_resources_api
from yunion_mps.kubernetes.kubelet.grpc import Rpc
from yunion_mps.kubernetes.kubelet.protos import (
    device_plugin_pb2,
    dra_health_pb2,
    dra_pb2,
    plugin_registration_pb2,
    pod_resources_pb2,
)

from simhost.environment import CHECKOUT

OLDER = {dra_api.PREPARE_BETA, dra_api.UNPREPARE_BETA, dra_api.WATCH_HEALTH_ALPHA}


@pytest.mark.processes
def test_the_generated_code_is_current(tmp_path: Path) -> None:
    """Otherwise, run scripts/protos."""
    subprocess.run([CHECKOUT / "scripts/protos", tmp_path], check=True)
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2.py*")}
    stored = [*CHECKOUT.glob("yunion_mps/**/*_pb2.py*"), *CHECKOUT.glob("tests/**/*_pb2.py*")]
    assert {path.relative_to(CHECKOUT): path.read_text() for path in stored} == generated


def rpcs(module: Any) -> list[Rpc[Any, Any]]:
    return [value for value in vars(module).values() if isinstance(value, Rpc)]


@pytest.mark.parametrize(
    ("module", "files"),
    [
        (device_plugin_api, [device_plugin_pb2]),
        (dra_api, [dra_pb2, dra_health_pb2, plugin_registration_pb2]),
        (pod_resources_api, [pod_resources_pb2]),
    ],
)
def test_methods_are_declared_as_in_the_proto_files(module: Any, files: list[Any]) -> None:
    published = {}
    for file in files:
        descriptor: FileDescriptor = file.DESCRIPTOR
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                published[path] = (method.input_type, method.output_type)
    declared = {}
    for rpc in rpcs(module):
        if rpc not in OLDER:
            declared[rpc.path] = (rpc.request.DESCRIPTOR, rpc.answer.DESCRIPTOR)
    assert declared == published


#: The program, with as many of the largest messages as it holds at the same time, of the smallest parts.
_PARSE = """
import re
from yunion_mps.kubernetes import service
from yunion_mps.kubernetes.received import MAX_HELD_BYTES, MAX_MESSAGE_BYTES
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import AllocateRequest
data = b"\\x0a\\0" * (MAX_MESSAGE_BYTES // 2)
messages = [AllocateRequest.FromString(data) for _ in range(MAX_HELD_BYTES // MAX_MESSAGE_BYTES)]
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.processes
def test_the_largest_messages_fit_into_the_memory_of_the_unit() -> None:
    assert "\nMemoryMax=256M\n" in (CHECKOUT / "systemd/yunion-mps-kubelet-plugin.service").read_text()
    done = subprocess.run([sys.executable, "-c", _PARSE], check=True, stdout=subprocess.PIPE)
    assert int(done.stdout) < 256 * 1024
