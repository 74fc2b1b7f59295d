"""Faults of a host without its daemon: files, file systems and hardware, each made for real or simulated."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simhost import SimHost
from unit.doctor.healthy import STRANGER, Seen, healthy, look

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and be other users")


@pytest.fixture
def host() -> Iterator[SimHost]:
    with healthy() as found:
        yield found


def on_small_disk(host: SimHost, place: Path, size: str, fill: str = "") -> Seen:
    """What the doctor says with a file system of this size at the place, in a namespace of its own."""
    steps = f'mount -t tmpfs -o mode=1777,size={size} tmpfs $0 && {fill or "true"} && exec "$@"'
    return look(host, before=("unshare", "--mount", "sh", "-c", steps, str(place)))


# -- the driver and its parts


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "problem"),
        ("Open Kernel Module for x86_64  535.10.01  Release Build", "warning"),
    ],
)
def test_a_kernel_module_of_another_version_is_found(host: SimHost, text: str, level: str) -> None:
    file = host.root / "proc/driver/nvidia/version"
    file.write_text(f"NVRM version: NVIDIA UNIX x86_64 {text}\n")
    assert look(host).one("driver", level)["what"].startswith("the loaded kernel module is of 5")


def test_a_library_of_another_version_is_found(host: SimHost) -> None:
    link = host.root / "lib/libcuda.so.1"
    link.unlink()
    (host.root / "lib/libcuda.so.545.23.06").touch()
    link.symlink_to("libcuda.so.545.23.06")
    assert look(host).one("driver", "problem")["what"].startswith(f"{link} is of 545.23.06, the driver of ")


def test_a_control_program_of_another_version_than_the_driver_is_found() -> None:
    with healthy(version="580.65.06") as host:
        # The one on PATH is a script around NVIDIA's own here.
        folder = host.root / "opt"
        folder.mkdir()
        path = os.pathsep.join(
            part for part in host.env["PATH"].split(os.pathsep) if not part.endswith("/mps")
        )
        real = shutil.which("nvidia-cuda-mps-control", path=path)
        assert real
        shutil.copy(real, folder)
        shutil.copy(host.root / "mps/nvidia-cuda-mps-server", folder)
        host.env["PATH"] = f"{folder}{os.pathsep}{path}"
        found = look(host).one("driver", "problem")["what"]
    assert found.startswith("nvidia-cuda-mps-control is of ")
    assert found.endswith("the driver of 580.65.06")


def test_a_library_that_is_missing_is_found(host: SimHost) -> None:
    (host.root / "lib/libcuda.so.1").unlink()
    assert "libcuda.so.1 was not found" in look(host).one("programs", "warning")["what"]


def test_a_library_that_only_the_loaders_cache_knows_is_found(host: SimHost) -> None:
    (host.root / "lib/libcuda.so.1").rename(host.root / "opt-libcuda.so.1")
    place = host.root / "far/libcuda.so.1"
    place.parent.mkdir()
    (host.root / "opt-libcuda.so.1").rename(place)
    (host.root / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0libcuda.so.1\0%s\0" % bytes(place))
    place.unlink()
    place.touch()
    assert look(host).one("programs", "ok")


def test_a_server_that_the_control_daemon_will_not_find_is_found(host: SimHost) -> None:
    (host.root / "mps/nvidia-cuda-mps-server").unlink()
    found = look(host).one("programs", "problem")
    assert "every client is refused" in found["what"]
    assert found["hint"] == f"install it, or link it into {host.root}/mps"


def test_a_control_program_that_is_missing_is_found(host: SimHost, tmp_path: Path) -> None:
    env = {**host.env, "PATH": str(tmp_path)}
    program = shutil.which("yunion-mps", path=host.env["PATH"])
    assert program
    (tmp_path / "yunion-mps").symlink_to(program)
    if not any(
        os.path.exists(f"{folder}/nvidia-cuda-mps-control") for folder in ("/usr/bin", "/usr/local/bin")
    ):
        assert "not installed" in look(host, env=env).one("programs", "problem")["what"]


def test_a_device_node_that_is_missing_is_found(host: SimHost) -> None:
    (host.root / "dev/nvidia-uvm").unlink()
    found = look(host).one("device nodes", "problem")
    assert found["what"] == f"{host.root}/dev/nvidia-uvm: missing, so no CUDA program runs"


def test_a_node_that_only_root_may_open_is_found_one_of_a_group_is_not(host: SimHost) -> None:
    node = host.root / "dev/nvidia1"
    node.chmod(0o660)
    assert (
        f"{node}: users other than root may not open it" in look(host).one("device nodes", "problem")["what"]
    )
    if os.geteuid() == 0:
        os.chown(node, 0, 44)
        assert look(host).one("device nodes", "ok")["what"].endswith("for the groups 44 only")


# -- virtual machines


@pytest.mark.parametrize("name", ["GRID T4-16C", "NVIDIA A40-48Q", "NVIDIA A100-1-5C", "GRID V100D-8A"])
def test_a_vgpu_is_a_warning(name: str) -> None:
    with healthy({"kind": "t4", "name": name}) as host:
        assert f"({name}) is a vGPU" in look(host).one("vGPU", "warning")["what"]


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "Tesla P100-PCIE-16GB", "NVIDIA A100-SXM4-80GB"])
def test_a_whole_gpu_is_taken_for_no_vgpu(name: str) -> None:
    with healthy({"kind": "t4", "name": name}) as host:
        assert look(host).one("vGPU", "ok")


def test_a_gpu_that_serves_virtual_machines_is_found(host: SimHost) -> None:
    folder = host.root / "sys/bus/pci/devices/0000:00:06.0"
    (folder / "sriov_numvfs").write_text("16\n")
    assert "serves 16 virtual functions" in look(host).one("vGPU", "problem")["what"]
    (folder / "mdev_supported_types/nvidia-222/devices/4f3e").mkdir(parents=True)
    assert "serves 1 vGPU for virtual machines" in look(host).one("vGPU", "problem")["what"]


# -- directories


@needs_root
@pytest.mark.parametrize("closed", ["tmp/nvidia-mps", "tmp/nvidia-mps/pipe"])
def test_a_directory_that_other_users_cannot_enter_is_found(host: SimHost, closed: str) -> None:
    pipe = host.root / "tmp/nvidia-mps/pipe"
    pipe.mkdir(parents=True)
    assert look(host).one("pipe directory", "ok")
    (host.root / closed).chmod(0o700)
    assert host.run(["ls", "-d", f"{pipe}/."], user=STRANGER, extra_groups=[]).returncode != 0
    found = look(host).one("pipe directory", "problem")
    assert found["what"].startswith(f"{host.root}/{closed} cannot be entered by other users")
    as_user = look(host, user=STRANGER, group=STRANGER, extra_groups=[])
    assert as_user.one("pipe directory", "problem") == found
    assert host.run(found["hint"].split()).returncode == 0
    assert host.run(["ls", "-d", f"{pipe}/."], user=STRANGER, extra_groups=[]).returncode == 0
    assert look(host).one("pipe directory", "ok")


@needs_root
def test_a_pipe_directory_must_be_limited_to_its_group(host: SimHost) -> None:
    pipe = host.root / "tmp/nvidia-mps/pipe"
    pipe.mkdir(parents=True)
    with (host.root / "etc/yunion/host.conf").open("a") as file:
        file.write("cuda_mps_pipe_group: daemon\n")
    assert "is open to all users" in look(host).one("pipe directory", "problem")["what"]
    pipe.chmod(0o710)
    assert look(host).one("pipe directory", "ok")["what"] == f"{pipe}: only the group daemon can enter"


@needs_root
def test_a_pipe_directory_of_another_user_is_found(host: SimHost) -> None:
    pipe = host.root / "tmp/nvidia-mps/pipe"
    pipe.mkdir(parents=True)
    os.chown(pipe.parent, STRANGER, STRANGER)
    assert f"{pipe.parent} belongs to nobody" in look(host).one("pipe directory", "problem")["what"]


def test_a_pipe_directory_that_all_may_write_is_found(host: SimHost) -> None:
    pipe = host.root / "tmp/nvidia-mps/pipe"
    pipe.mkdir(parents=True)
    pipe.chmod(0o777)
    found = look(host).one("pipe directory", "problem")
    assert (found["what"].split(" may ")[0], found["hint"]) == (str(pipe), f"chmod go-w {pipe}")


@needs_root
def test_a_symlink_of_another_user_on_the_way_is_found(host: SimHost) -> None:
    (host.root / "elsewhere/pipe").mkdir(parents=True)
    link = host.root / "tmp/nvidia-mps"
    link.symlink_to(host.root / "elsewhere")
    os.lchown(link, STRANGER, STRANGER)
    assert f"{link} is a symlink of nobody" in look(host).one("pipe directory", "problem")["what"]


def test_a_file_in_the_place_of_the_directory_is_found(host: SimHost) -> None:
    (host.root / "tmp/nvidia-mps").mkdir()
    (host.root / "tmp/nvidia-mps/pipe").touch()
    assert "is not a directory" in look(host).one("pipe directory", "problem")["what"]


def rules(host: SimHost, folder: str, text: str) -> None:
    place = host.root / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "tmp.conf").write_text(text)


def test_sockets_that_are_cleaned_by_age_are_found_until_they_are_kept(host: SimHost) -> None:
    assert look(host).one("cleaning", "ok")
    rules(host, "usr/lib/tmpfiles.d", "# RHEL's\nq /tmp 1777 root root 10d\nq /var/tmp 1777 root root 30d\n")
    found = look(host).one("cleaning", "warning")
    assert found["what"].startswith("systemd-tmpfiles removes from /tmp what is older than 10d")
    line = found["hint"].split("'")[1]
    (host.root / "etc/tmpfiles.d").mkdir(parents=True)
    (host.root / "etc/tmpfiles.d/mps.conf").write_text(f"{line}\n")
    assert look(host).one("cleaning", "ok")


@pytest.mark.parametrize(
    "line", ["x /tmp/nvidia-mps", "X /tmp/nvidia-mps/*", "x /tmp/nvidia*", "D /tmp 1777 - - -"]
)
def test_what_keeps_sockets_from_being_cleaned_is_known(host: SimHost, line: str) -> None:
    rules(host, "usr/lib/tmpfiles.d", "q /tmp 1777 root root 10d\n")
    name = "tmp.conf" if line.startswith("D") else "mps.conf"  # a file of /etc hides the one of its name
    (host.root / "etc/tmpfiles.d").mkdir(parents=True)
    (host.root / f"etc/tmpfiles.d/{name}").write_text(f"{line}\n")
    assert look(host).one("cleaning", "ok")


@needs_root
def test_a_full_or_read_only_disk_is_found(host: SimHost) -> None:
    found = on_small_disk(host, host.root / "tmp", "1m").one("disk space", "problem")
    assert found["what"].endswith("has 1 MiB left: the control daemon cannot write its log")
    seen = on_small_disk(host, host.root / "tmp", "32m", 'mount -o remount,ro "$0"')
    assert seen.one("disk space", "problem")["what"].endswith("is read-only")
    seen = on_small_disk(host, host.root / "tmp", "32m,nr_inodes=2", 'touch "$0/last"')
    assert seen.one("disk space", "problem")["what"].endswith("has no inodes left")


# -- shared memory


@needs_root
def test_shared_memory_that_is_small_or_full_is_found(host: SimHost) -> None:
    place = host.root / "dev/shm"
    assert "has 16 MiB in all" in on_small_disk(host, place, "16m").one("/dev/shm", "warning")["what"]
    full = on_small_disk(host, place, "64m", 'head -c 60m /dev/zero >"$0/full"')
    assert "is full (4 MiB" in full.one("/dev/shm", "problem")["what"]


def test_shared_memory_that_is_not_for_all_is_found(host: SimHost) -> None:
    (host.root / "dev/shm").chmod(0o755)
    found = look(host).one("/dev/shm", "problem")
    assert found["hint"] == f"chmod 1777 {host.root}/dev/shm"


def test_shared_memory_that_is_missing_is_found(host: SimHost) -> None:
    (host.root / "dev/shm").rmdir()
    assert "No such file or directory" in look(host).one("/dev/shm", "problem")["what"]


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


def selinux(host: SimHost, enforce: str, log: str) -> None:
    for path, text in (("sys/fs/selinux/enforce", enforce), ("var/log/audit/audit.log", log)):
        (host.root / path).parent.mkdir(parents=True, exist_ok=True)
        (host.root / path).write_text(text)


def test_what_selinux_refused_is_found_with_what_allows_it(host: SimHost) -> None:
    selinux(host, "1", AVC.format(at=int(time.time()) - 60))
    found = look(host).one("SELinux and AppArmor", "problem")
    assert "SELinux refused MPS 'connectto' (1 times" in found["what"]
    assert "path /tmp/nvidia-mps/pipe/control" in found["what"]
    assert found["hint"].startswith("ausearch -m avc -c nvidia-cuda-mps | audit2allow")
    selinux(host, "0", AVC.format(at=int(time.time()) - 60))
    assert look(host).one("SELinux and AppArmor", "warning")


def test_what_selinux_refused_long_ago_or_to_others_is_not_told(host: SimHost) -> None:
    others = AVC.replace("nvidia-cuda-mps", "sshd").replace("nvidia-mps", "x").format(at=int(time.time()))
    granted = AVC.replace("denied", "granted").format(at=int(time.time()))
    selinux(host, "1", AVC.format(at=1_600_000_000) + others + granted)
    found = look(host).one("SELinux and AppArmor", "ok")
    assert found["what"] == "SELinux is enforcing, and has refused MPS nothing within the last day"


def test_what_apparmor_refused_is_found(host: SimHost) -> None:
    parameters = host.root / "sys/module/apparmor/parameters"
    parameters.mkdir(parents=True)
    (parameters / "enabled").write_text("Y\n")
    (host.root / "dev/kmsg").write_text(APPARMOR.format(at=int(time.time())))
    assert "AppArmor refused MPS 'open'" in look(host).one("SELinux and AppArmor", "problem")["what"]


@needs_root
def test_logs_that_only_root_can_read_are_said_to_be_so(host: SimHost) -> None:
    selinux(host, "1", "")
    (host.root / "var/log/audit").chmod(0o700)
    seen = look(host, user=STRANGER, group=STRANGER, extra_groups=[])
    assert "only root can read" in seen.one("SELinux and AppArmor", "skipped")["what"]


# -- what every user gets at login


def test_a_variable_that_every_user_gets_is_found(host: SimHost) -> None:
    (host.root / "etc/profile.d").mkdir()
    file = host.root / "etc/profile.d/cuda.sh"
    file.write_text("export PATH=/usr/local/cuda/bin:$PATH\nexport CUDA_HOME=/usr/local/cuda\n")
    assert look(host).one("logins", "ok")
    file.write_text("export CUDA_VISIBLE_DEVICES=0\n")
    assert look(host).one("logins", "warning")["what"] == f"{file} gives every user CUDA_VISIBLE_DEVICES=0"
    (host.root / "etc/environment").write_text('CUDA_MPS_PIPE_DIR="/tmp/nvidia-mps/pipe"\n')
    found = look(host).checks["logins"]
    assert [one["level"] for one in found] == ["problem", "warning"]
    assert "etc/environment: no program reads CUDA_MPS_PIPE_DIR" in found[0]["what"]


def test_our_own_pipe_directory_for_every_user_is_no_mistake(host: SimHost) -> None:
    pipe = host.root / "tmp/nvidia-mps/pipe"
    (host.root / "etc/environment").write_text(f"CUDA_MPS_PIPE_DIRECTORY={pipe}\n")
    assert look(host).one("logins", "ok")
