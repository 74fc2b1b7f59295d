"""The preflight: both files and the GPUs checked together, with nothing on the host changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.core.errors import ConfigError, DriverError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import DIRECTORY_TAKEN
from yunion_mps.supervisor.preflight import Preflight, run_preflight

from simhost import SimHost
from unit.as_user import needs_root
from unit.http.server_host import NOBODY
from unit.supervised import MakeHost


def preflight_of(host: SimHost) -> Preflight:
    with closing(run_preflight(Paths(str(host.root)))) as found:
        return found


def messages(host: SimHost) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight_of(host).check()
    return [str(problem).replace(str(host.root), "") for problem in caught.value.problems]


def test_the_problems_of_the_files_and_of_the_host_are_reported_together(make_host: MakeHost) -> None:
    host = make_host()
    etc = host.root / "etc/yunion"
    (etc / "host.conf").write_text("enable_cuda_mps: true\ncuda_mps_scope: hots\n")
    (etc / "host_container_device.yml").write_text(
        "devices:\n"
        "- {path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 17}\n"
        "- {path: 00:06.0, type: NVIDIA_MPS, virtual_number: 4}\n"
        "- {path: 00:0f.0, type: NVIDIA_MPS, virtual_number: 0}\n"
        "- {path: 0000:00:0f.0, type: NVIDIA_MPS, virtual_number: 1}\n"
    )
    clients = "more than the 16 clients that MPS allows on GPU 00:06.0 (Tesla P40): write at most 16"
    twice = "which is already divided on line 2 as /dev/dri/renderD128: remove one of the two entries"
    same = "path 0000:00:0f.0 is already divided on line 4 as 00:0f.0: remove one of the two entries"
    assert messages(host) == [
        '/etc/yunion/host.conf:2: cuda_mps_scope is "hots", but must be host or gpu: did you mean host?',
        *(
            f"/etc/yunion/host_container_device.yml:{message}"
            for message in (
                "4: virtual_number is 0, out of range: write a whole number from 1 to 60",
                f"2: virtual_number is 17, {clients}",
                f"3: path 00:06.0 is GPU 00:06.0, {twice}",
                f"5: {same}",
            )
        ),
    ]


@needs_root
@pytest.mark.parametrize("taken", ["tmp/nvidia-mps", "tmp/nvidia-mps/pipe"])
def test_a_pipe_directory_that_another_user_made_first_is_not_used(make_host: MakeHost, taken: str) -> None:
    host = make_host()
    (host.root / "tmp").mkdir(exist_ok=True)
    (host.root / "tmp").chmod(0o1777)
    (host.root / taken).mkdir(parents=True)
    os.chown(host.root / taken, NOBODY, NOBODY)
    found = preflight_of(host)
    found.check()
    (domain,) = found.plan.domains
    assert domain.pipe_directory == "/run/nvidia-mps/pipe"
    has_log = taken == "tmp/nvidia-mps"
    (warning,) = found.all_warnings
    assert domain.log_directory == ("/run/nvidia-mps/log" if has_log else "/tmp/nvidia-mps/log")
    assert warning.code == DIRECTORY_TAKEN
    place = f"{host.root}/{taken}"
    log = ", and /run/nvidia-mps/log instead of /tmp/nvidia-mps/log" if has_log else ""
    uses = f"the daemon uses /run/nvidia-mps/pipe instead of /tmp/nvidia-mps/pipe{log}"
    aside = f'mv {place} "$(mktemp -d {os.path.dirname(place)}/old.XXXXXX)"'
    mend = f"check it (ls -la {place}); then {aside} && mkdir -m 755 {place}, or choose another directory"
    assert warning == f"{place} belongs to another user (nobody): {uses}; {mend}"
    assert found.configured.cuda_mps_pipe_directory == "/tmp/nvidia-mps/pipe", "as it is written"
    assert found.configured.cuda_mps_log_directory == "/tmp/nvidia-mps/log"
    os.rmdir(host.root / taken)
    again = preflight_of(host)
    assert (again.plan.domains[0].pipe_directory, again.all_warnings) == ("/tmp/nvidia-mps/pipe", ())


def open_to_all(pipes: Path) -> str:
    pipes.chmod(0o777)
    return f"{pipes} is writable by other users (mode 777)"


def open_the_parent_to_all(pipes: Path) -> str:
    return open_to_all(pipes.parent)


def put_strangers_file(pipes: Path) -> str:
    (pipes / "control").touch()
    os.chown(pipes / "control", NOBODY, NOBODY)
    return f"{pipes}/control belongs to another user (nobody)"


def put_link(pipes: Path) -> str:
    (pipes / "control").symlink_to("/run/control")
    return f"{pipes}/control is a symlink of root, which is not followed"


@needs_root
@pytest.mark.parametrize("spoil", [open_to_all, open_the_parent_to_all, put_strangers_file, put_link])
@pytest.mark.parametrize("configured", ["/tmp/nvidia-mps/pipe", "/srv/mps/pipe"])
def test_roots_pipe_directory_that_others_made_unsafe_is_not_used(
    make_host: MakeHost, spoil: Callable[[Path], str], configured: str
) -> None:
    host = make_host()
    text = f"enable_cuda_mps: true\ncuda_mps_pipe_directory: {configured}\n"
    (host.root / "etc/yunion/host.conf").write_text(text)
    pipes = Path(f"{host.root}{configured}")
    pipes.mkdir(parents=True)
    what = spoil(pipes)
    found = preflight_of(host)
    found.check()
    assert [domain.pipe_directory for domain in found.plan.domains] == ["/run/nvidia-mps/pipe"]
    (warning,) = found.all_warnings
    assert warning.startswith(f"{what}: the daemon uses /run/nvidia-mps/pipe instead of {configured}")
    assert warning.code == DIRECTORY_TAKEN
    assert found.configured.cuda_mps_pipe_directory == configured


def test_a_host_without_a_driver_is_a_separate_error(make_host: MakeHost) -> None:
    host = make_host()
    host.fail("nvmlInit", "driver_not_loaded")
    found = preflight_of(host)
    assert (found.nvml, found.inventory.gpus) == (None, ())
    (entry,) = found.plan.missing
    assert entry.reason == "the NVIDIA driver's kernel module is not loaded"
    with pytest.raises(DriverError, match="the NVIDIA driver's kernel module is not loaded"):
        found.check()


def test_a_bad_configuration_is_reported_before_a_missing_driver(make_host: MakeHost) -> None:
    host = make_host()
    host.fail("nvmlInit", "driver_not_loaded")
    (host.root / "etc/yunion/host_container_device.yml").write_text("devices: 4\n")
    assert len(messages(host)) == 1


def test_a_driver_that_fails_during_the_search_is_an_error(make_host: MakeHost) -> None:
    host = make_host()
    host.fail("nvmlDeviceGetCount", "unknown")
    with pytest.raises(DriverError, match="NVML error: Unknown Error"):
        preflight_of(host).check()


def test_no_driver_is_needed_if_mps_is_not_enabled(make_host: MakeHost) -> None:
    host = make_host()
    host.fail("nvmlInit", "library_not_found")
    (host.root / "etc/yunion/host.conf").write_text("enable_cuda_mps: false\n")
    found = preflight_of(host)
    found.check()
    assert (found.nvml, found.plan.devices, found.plan.domains) == (None, (), ())
