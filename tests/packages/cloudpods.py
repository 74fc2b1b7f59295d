"""A package as Cloudpods has it: the same name and unit, and a daemon that starts MPS and then only waits."""

from __future__ import annotations

import subprocess
from pathlib import Path

from packages.operator import PIPE
from packages.versions import Packages, build_rpm

VERSION = "4.0.1"
#: Made when it serves, for the tests.
SERVES = "/run/mps-daemon.serves"
_DAEMON = f"""\
#!/bin/sh
export CUDA_MPS_PIPE_DIRECTORY={PIPE} CUDA_MPS_LOG_DIRECTORY=/tmp/nvidia-mps/log
mkdir -p $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY
nvidia-smi -i 0 -c EXCLUSIVE_PROCESS
nvidia-cuda-mps-control -d
printf '%s\\n' 'set_default_device_pinned_mem_limit 0 5760M' 'set_default_active_thread_percentage 25' |
    nvidia-cuda-mps-control
touch {SERVES}
trap 'echo quit | nvidia-cuda-mps-control; exit 0' TERM
while :; do sleep 1 & wait $!; done
"""
_UNIT = """\
[Unit]
Description=Yunion MPS daemon
[Service]
ExecStart=/opt/yunion/bin/mps-daemon
KillMode=process
[Install]
WantedBy=multi-user.target
"""
_FILES = {
    "opt/yunion/bin/mps-daemon": (_DAEMON, 0o755),
    "usr/lib/systemd/system/yunion-mps-daemon.service": (_UNIT, 0o644),
}
_CONTROL = f"""\
Package: yunion-mps-daemon
Version: {VERSION}
Architecture: amd64
Maintainer: nobody <nobody@localhost>
Description: MPS daemon of a cloud
"""
# Its rpm stops and disables the service whenever a version of it goes.
_SPEC = f"""\
Name: yunion-mps-daemon
Version: {VERSION}
Release: 1
Summary: MPS daemon of a cloud
License: Apache-2.0
BuildArch: x86_64
%description
%install
cp -a {{files}}/. %{{{{buildroot}}}}/
%preun
systemctl disable yunion-mps-daemon
systemctl stop yunion-mps-daemon
%files
/opt/yunion/bin/mps-daemon
/usr/lib/systemd/system/yunion-mps-daemon.service
"""


def cloudpods(folder: Path) -> Packages:
    files = folder / "cloudpods"
    for name, (text, mode) in _FILES.items():
        path = files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    rpm = build_rpm(folder / "cloudpods-rpm", _SPEC.format(files=files))
    (files / "DEBIAN").mkdir(exist_ok=True)
    (files / "DEBIAN/control").write_text(_CONTROL)
    deb = folder / "cloudpods.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "--build", str(files), str(deb)], check=True, capture_output=True
    )
    return Packages(VERSION, deb, rpm)
