"""How the kubelet is set up: its configuration, and the kernel settings that it wants to find."""

from __future__ import annotations

import json

from integration.gateway_host import free_port

_CONFIG = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "address": "127.0.0.1",
    "healthzPort": 0,
    "authentication": {"webhook": {"enabled": False}, "anonymous": {"enabled": True}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "failCgroupV1": False,
    "failSwapOn": False,
    "makeIPTablesUtilChains": False,
    "evictionHard": {},
    "imageGCHighThresholdPercent": 100,
    "resolvConf": "",
    "oomScoreAdj": 0,
    "syncFrequency": "5s",
    "nodeStatusUpdateFrequency": "1s",
}
#: Shell commands that hide the settings which the kubelet would otherwise change for the whole machine; the
#: files that it finds instead are in the directory `$settings`.
HIDE_SETTINGS = """\
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000
do
    mkdir -p "$settings/${setting%/*}"
    echo "${setting#*=}" >"$settings/${setting%=*}"
    mount --bind "$settings/${setting%=*}" "/proc/sys/${setting%=*}"
done
"""


def kubelet_config(containerd: str, **more: str) -> str:
    """The file for the kubelet's --config; `containerd` is the path of containerd's socket."""
    changes = {"port": free_port(), "containerRuntimeEndpoint": f"unix://{containerd}", **more}
    return json.dumps({**_CONFIG, **changes})
