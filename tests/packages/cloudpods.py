"""A stand-in for Cloudpods' package of the same name: its files, its scripts, and a daemon that does as its.

The daemon is after cmd/mps-daemon/main.go of github.com/yunionio/cloudpods, unit and scripts after
build/mps-daemon, build/build.sh and build/build_deb.sh there.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

VERSION = "3.11.9"
PROGRAM = "/opt/yunion/bin/mps-daemon"
_UNIT_PLACE = "usr/lib/systemd/system/yunion-mps-daemon.service"

_DAEMON = """\
#!/bin/bash
export CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps/pipe CUDA_MPS_LOG_DIRECTORY=/tmp/nvidia-mps/log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-smi -i 0 -c EXCLUSIVE_PROCESS || exit
nvidia-cuda-mps-control -d || exit
echo set_default_active_thread_percentage 10 | nvidia-cuda-mps-control
trap 'echo quit | nvidia-cuda-mps-control; exit' TERM INT
while :; do sleep 1; done
"""
_UNIT = f"""\
[Unit]
Description=Yunion MPS Daemon
Documentation=https://docs.yunion.cn

[Service]
Type=simple
User=root
Group=root
ExecStart={PROGRAM}
WorkingDirectory=/opt/yunion/bin
KillMode=process
Restart=always
RestartSec=30
LimitNOFILE=500000
LimitNPROC=500000

[Install]
WantedBy=multi-user.target
"""
_CONTROL = f"""\
Package: yunion-mps-daemon
Version: {VERSION}-24112208
Section: base
Priority: optional
Architecture: amd64
Maintainer: nobody@localhost
Description: Yunion mps-daemon
"""
#: The scripts of its rpm disable and stop the service also in an upgrade; those of its deb do not exist.
_SPEC = f"""\
Name: yunion-mps-daemon
Version: {VERSION}
Release: 24112208
Summary: yunion-mps-daemon
License: GPL
%define __os_install_post %{{nil}}
AutoReqProv: no
%description
Yunion MPS Daemon Utility
%install
cp -a %{{tree}}/. %{{buildroot}}/
%post
/usr/bin/systemctl preset yunion-mps-daemon.service >/dev/null 2>&1 ||:
%preun
/usr/bin/systemctl --no-reload disable yunion-mps-daemon.service >/dev/null 2>&1 || :
/usr/bin/systemctl stop yunion-mps-daemon.service >/dev/null 2>&1 ||:
%postun
/usr/bin/systemctl daemon-reload >/dev/null 2>&1 ||:
%files
{PROGRAM}
/{_UNIT_PLACE}
"""


def cloudpods_deb(folder: Path) -> Path:
    """Its deb, built in an empty folder."""
    tree = _tree(folder / "tree")
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(_CONTROL)
    deb = folder / "cloudpods.deb"
    _run("dpkg-deb", "--root-owner-group", "--build", str(tree), str(deb))
    return deb


def cloudpods_rpm(folder: Path) -> Path:
    """Its rpm, built in an empty folder."""
    tree = _tree(folder / "tree")
    spec = folder / "cloudpods.spec"
    spec.write_text(_SPEC)
    defines = [f"_topdir {folder}/topdir", f"_rpmdir {folder}/cloudpods", f"tree {tree}"]
    _run("rpmbuild", "-bb", *(word for one in defines for word in ("--define", one)), str(spec))
    (rpm,) = folder.glob("cloudpods/*/*.rpm")
    return rpm


def _tree(tree: Path) -> Path:
    for place, text, mode in ((PROGRAM[1:], _DAEMON, 0o755), (_UNIT_PLACE, _UNIT, 0o644)):
        path = tree / place
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(mode)
    return tree


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
