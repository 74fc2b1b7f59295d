"""Faults in files and directories, each made for real in a host of files alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from yunion_mps.doctor.checks import Host

from unit.doctor.hosts import check_findings, finding_of, host_of, write
from unit.http.server_host import NOBODY, as_user, short_root

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may be other users")


@pytest.fixture
def root() -> Iterator[Path]:
    """One that other users can look into."""
    with short_root() as paths:
        yield Path(paths.root)


@pytest.fixture
def host(root: Path) -> Host:
    return host_of(root)


@pytest.fixture
def pipe(root: Path) -> Path:
    directory = root / "tmp/nvidia-mps/pipe"
    directory.mkdir(parents=True)
    return directory


# -- the pipe directory


@needs_root
@pytest.mark.parametrize("closed", ["tmp/nvidia-mps", "tmp/nvidia-mps/pipe"])
def test_a_directory_that_other_users_cannot_enter_is_found(
    host: Host, root: Path, pipe: Path, closed: str
) -> None:
    assert finding_of(host, "pipe directory", "ok")
    (root / closed).chmod(0o700)
    finding = finding_of(host, "pipe directory", "problem")
    assert finding.what.startswith(f"{root}/{closed} is not accessible to other users")
    with as_user(NOBODY):
        assert not os.access(f"{pipe}/.", os.F_OK, effective_ids=True)
        assert finding_of(host, "pipe directory", "problem") == finding
    assert finding.hint == f"chmod a+x {root}/{closed}"
    (root / closed).chmod(0o711)
    assert finding_of(host, "pipe directory", "ok")


@needs_root
def test_a_pipe_directory_must_be_limited_to_its_group(root: Path, pipe: Path) -> None:
    host = host_of(root, cuda_mps_pipe_group="daemon")
    assert "is open to all users" in finding_of(host, "pipe directory", "problem").what
    pipe.chmod(0o710)
    assert finding_of(host, "pipe directory", "ok").what == f"{pipe}: only the group daemon have access"


def _others_link(pipe: Path) -> None:
    shutil.move(pipe.parent, pipe.parent.with_name("elsewhere"))
    pipe.parent.symlink_to(pipe.parent.with_name("elsewhere"))
    os.lchown(pipe.parent, NOBODY, NOBODY)


def _others_file(pipe: Path) -> None:
    (pipe / "theirs").touch()
    os.chown(pipe / "theirs", NOBODY, NOBODY)


def _file_in_its_place(pipe: Path) -> None:
    pipe.rmdir()
    pipe.touch()


@needs_root
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (
            lambda pipe: os.chown(pipe.parent, NOBODY, NOBODY),
            "tmp/nvidia-mps belongs to another user (nobody)",
        ),
        (lambda pipe: pipe.chmod(0o777), "tmp/nvidia-mps/pipe is writable by other users"),
        (_others_link, "tmp/nvidia-mps is a symlink of nobody, which is not followed"),
        (_file_in_its_place, "tmp/nvidia-mps/pipe is not a directory"),
        (lambda pipe: (pipe / "control").touch(0o600), "other users may not connect to "),
        (_others_file, "tmp/nvidia-mps/pipe/theirs belongs to another user (nobody)"),
    ],
    ids=["owner", "mode", "symlink", "file", "socket", "entry"],
)
def test_a_pipe_directory_that_others_could_change_or_not_use_is_found(
    host: Host, pipe: Path, spoil: Callable[[Path], None], what: str
) -> None:
    spoil(pipe)
    assert what in finding_of(host, "pipe directory", "problem").what


# -- what is cleaned by its age

SYSTEMS = "# RHEL's\nq /tmp 1777 root root 10d\nq /var/tmp 1777 root root 30d\n"


def test_sockets_that_are_cleaned_by_age_are_found(host: Host, root: Path) -> None:
    assert finding_of(host, "socket cleanup", "ok")
    write(root / "usr/lib/tmpfiles.d/tmp.conf", SYSTEMS)
    finding = finding_of(host, "socket cleanup", "warning")
    assert finding.what.startswith("systemd-tmpfiles removes files older than 10d from /tmp")
    assert finding.hint.startswith("echo 'x /tmp/nvidia-mps/pipe' >")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("mps.conf", "x /tmp/nvidia-mps/pipe"), ("mps.conf", "x /tmp/nvidia-mps"),
        ("mps.conf", "X /tmp/nvidia-mps/*"), ("mps.conf", "x /tmp/nvidia*"),
        ("tmp.conf", "D /tmp 1777 - - -"),  # a file of /etc hides the one of its name
    ],
)  # fmt: skip
def test_rules_that_protect_sockets_from_cleanup_are_recognised(
    host: Host, root: Path, file: str, line: str
) -> None:
    write(root / "usr/lib/tmpfiles.d/tmp.conf", SYSTEMS)
    write(root / "etc/tmpfiles.d" / file, f"{line}\n")
    assert finding_of(host, "socket cleanup", "ok")


# -- shared memory and disks (full ones are in integration/doctor)


def test_disks_with_room_are_ok(host: Host, pipe: Path) -> None:
    assert finding_of(host, "disk space", "ok")


def test_shared_memory_that_is_not_for_all_or_missing_is_found(host: Host, root: Path) -> None:
    place = root / "dev/shm"
    assert "No such file or directory" in finding_of(host, "/dev/shm", "problem").what
    place.mkdir(parents=True)
    place.chmod(0o755)
    assert finding_of(host, "/dev/shm", "problem").hint == f"chmod 1777 {place}"
    place.chmod(0o1777)
    assert finding_of(host, "/dev/shm", "ok")


# -- SELinux and AppArmor

AVC = (
    'type=AVC msg=audit({at}.123:431): avc:  denied  {{ connectto }} for  pid=77 comm="nvidia-cuda-mps" '
    'path="/tmp/nvidia-mps/pipe/control" scontext=system_u:system_r:container_t:s0:c1,c2 '
    "tcontext=system_u:system_r:unconfined_service_t:s0 tclass=unix_stream_socket permissive=0\n"
)
APPARMOR = (
    '4,1,1,-;audit: type=1400 audit({at}.1:9): apparmor="DENIED" operation="open" profile="docker-default" '
    'name="/run/yunion-mps/x" pid=7 comm="nvidia-cuda-mps" requested_mask="r"\n'
)
NOW = int(time.time())


@pytest.fixture
def selinux(root: Path) -> Callable[[str, str], None]:
    """Set whether SELinux enforces, and what is in its log."""

    def set_up(enforce: str, log: str) -> None:
        write(root / "sys/fs/selinux/enforce", enforce)
        write(root / "var/log/audit/audit.log", log)

    return set_up


def test_selinux_denials_are_found_with_a_hint(host: Host, selinux: Callable[[str, str], None]) -> None:
    selinux("1", AVC.format(at=NOW - 60))
    finding = finding_of(host, "SELinux and AppArmor", "problem")
    assert "SELinux denied MPS the operation 'connectto' (1 time in" in finding.what
    assert "path /tmp/nvidia-mps/pipe/control" in finding.what
    assert finding.hint.startswith("ausearch -m avc -c nvidia-cuda-mps | audit2allow")
    selinux("0", AVC.format(at=NOW - 60))
    assert finding_of(host, "SELinux and AppArmor", "warning")


def test_old_and_unrelated_selinux_denials_are_ignored(
    host: Host, selinux: Callable[[str, str], None]
) -> None:
    others = AVC.replace("nvidia-cuda-mps", "sshd").replace("nvidia-mps", "x").format(at=NOW)
    granted = AVC.replace("denied", "granted").format(at=NOW)
    selinux("1", AVC.format(at=1_600_000_000) + others + granted)
    finding = finding_of(host, "SELinux and AppArmor", "ok")
    assert finding.what == "SELinux is enforcing; no denials for MPS in the last day"


def test_apparmor_denials_are_found(host: Host, root: Path) -> None:
    assert finding_of(host, "SELinux and AppArmor", "ok").what == "neither is active"
    write(root / "sys/module/apparmor/parameters/enabled", "Y\n")
    write(root / "dev/kmsg", APPARMOR.format(at=NOW))
    assert (
        "AppArmor denied MPS the operation 'open'" in finding_of(host, "SELinux and AppArmor", "problem").what
    )


@needs_root
def test_unreadable_logs_are_reported_differently_to_root(
    host: Host, root: Path, selinux: Callable[[str, str], None]
) -> None:
    selinux("1", "")
    (root / "var/log/audit").chmod(0o700)
    with as_user(NOBODY):
        found = finding_of(host, "SELinux and AppArmor", "skipped")
    assert found.what == "only root can see the logs of denials (audit.log, dmesg)"
    assert found.hint == "run doctor as root"
    (root / "var/log/audit/audit.log").unlink()
    found = finding_of(host, "SELinux and AppArmor", "skipped")
    assert found.what == "even root cannot see the logs of denials (audit.log, dmesg) here"
    assert found.hint == "run doctor outside containers, with all capabilities"


# -- what every user gets at login


def test_a_variable_that_every_user_gets_is_found(host: Host, root: Path) -> None:
    file = root / "etc/profile.d/cuda.sh"
    write(file, "export PATH=/usr/local/cuda/bin:$PATH\nexport CUDA_HOME=/usr/local/cuda\n")
    assert finding_of(host, "login files", "ok")
    write(file, "export CUDA_VISIBLE_DEVICES=0\n")
    assert (
        finding_of(host, "login files", "warning").what
        == f"{file} sets CUDA_VISIBLE_DEVICES=0 for every user"
    )
    write(root / "etc/environment", 'CUDA_MPS_PIPE_DIR="/tmp/nvidia-mps/pipe"\n')
    first, second = check_findings(host, "login files")
    assert (first.level, second.level) == ("problem", "warning")
    assert "etc/environment: CUDA_MPS_PIPE_DIR has no effect" in first.what


def test_our_own_pipe_directory_for_every_user_is_no_mistake(host: Host, root: Path) -> None:
    write(root / "etc/environment", f"CUDA_MPS_PIPE_DIRECTORY={root}/tmp/nvidia-mps/pipe\n")
    assert finding_of(host, "login files", "ok")
