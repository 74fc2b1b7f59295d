"""The directories of each domain: decided once, with what is running, and created as they are chosen."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.core.enums import MPS, READY
from yunion_mps.core.errors import ShortageError
from yunion_mps.core.models import DomainPlan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import DIRECTORY_TAKEN
from yunion_mps.mps.processes import MpsProcess
from yunion_mps.supervisor.domain_directories import DomainDirectories
from yunion_mps.supervisor.preflight import Preflight, run_preflight

from simhost import SimHost
from unit.as_user import needs_root
from unit.file_systems import file_system_of, fill, hung_mount
from unit.http.server_host import NOBODY
from unit.leases.lease_builders import leases_on
from unit.supervised import MakeHost, StartSupervised, StartWithJob, Supervised, configure, pid

pytestmark = [needs_root, pytest.mark.processes]

OURS = ("/run/nvidia-mps/pipe", "/run/nvidia-mps/log")
TWO = [{"kind": "v100"}, {"kind": "v100"}]


def preflight_of(host: SimHost, *, creates: bool = False) -> Preflight:
    with closing(run_preflight(Paths(str(host.root)), creates_directories=creates)) as found:
        return found


def domains_of(host: SimHost) -> tuple[DomainPlan, ...]:
    return preflight_of(host).plan.domains


def put_strangers_file(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "control").touch()
    os.chown(directory / "control", NOBODY, NOBODY)


def in_effect(made: Supervised) -> list[tuple[str, str]]:
    """The state of each domain, and its pipe directory below the root."""
    root = str(made.host.root)
    rows = [(domain.state, domain.plan.pipe_directory.removeprefix(root)) for domain in made.snapshot.domains]
    return sorted(rows, key=lambda row: row[1])


def codes(made: Supervised) -> list[str]:
    return [warning.reason.code for warning in made.warnings]


def open_to_all(made: Supervised) -> None:
    Path(made.paths.under("/tmp/nvidia-mps")).chmod(0o777)


# -- the decision


def test_in_a_shortage_nothing_is_decided(make_host: MakeHost) -> None:
    """It is not known which directories are in use, so none of them may be left."""

    def fail() -> list[MpsProcess]:
        raise ShortageError("no process can be listed")

    host = make_host(TWO)
    found = preflight_of(host)
    directories = DomainDirectories(found.config, Paths(str(host.root)), creates=False, find_running=fail)
    with pytest.raises(ShortageError):
        directories.place(found.plan)


def test_each_domain_has_a_decision_of_its_own(make_host: MakeHost) -> None:
    host = make_host(TWO, cuda_mps_scope="gpu")
    first, second = domains_of(host)
    put_strangers_file(Path(f"{host.root}{second.pipe_directory}"))
    found = preflight_of(host)
    uuid = host.gpus[1].uuid
    assert [domain.pipe_directory for domain in found.plan.domains] == [
        first.pipe_directory,
        f"/run/nvidia-mps/pipe/{uuid}",
    ]
    (warning,) = found.all_warnings
    uses = f"the daemon uses /run/nvidia-mps/pipe/{uuid} instead of /tmp/nvidia-mps/pipe/{uuid}; check it"
    assert uses in warning
    assert warning.code == DIRECTORY_TAKEN


def test_an_obstacle_above_many_domains_is_one_warning(make_host: MakeHost) -> None:
    host = make_host(TWO, cuda_mps_scope="gpu")
    (host.root / "tmp/nvidia-mps").mkdir(parents=True)
    (host.root / "tmp/nvidia-mps").chmod(0o777)
    (warning,) = preflight_of(host).all_warnings
    uses = "/run/nvidia-mps/pipe instead of /tmp/nvidia-mps/pipe, and /run/nvidia-mps/log instead of "
    assert f": the daemon uses {uses}/tmp/nvidia-mps/log; check it" in warning


def test_a_log_directory_that_is_unsafe_moves_no_pipe_directory(make_host: MakeHost) -> None:
    host = make_host()
    put_strangers_file(host.root / "tmp/nvidia-mps/log")
    (domain,) = domains_of(host)
    places = (domain.pipe_directory, domain.log_directory)
    assert places == ("/tmp/nvidia-mps/pipe", "/run/nvidia-mps/log")


def test_if_our_own_directories_are_unsafe_there_are_others(make_host: MakeHost) -> None:
    host = make_host()
    for directory in ("tmp/nvidia-mps", "run/nvidia-mps"):
        (host.root / directory).mkdir(parents=True)
        (host.root / directory).chmod(0o777)
    (domain,) = domains_of(host)
    places = (domain.pipe_directory, domain.log_directory)
    assert places == ("/run/yunion-mps/nvidia-mps/pipe", "/run/yunion-mps/nvidia-mps/log")


def test_directories_are_created_as_they_are_chosen(make_host: MakeHost) -> None:
    """So no other user can create them before the control daemon starts."""
    host = make_host()
    (host.root / "tmp").mkdir(exist_ok=True)
    preflight_of(host)
    assert not (host.root / "tmp/nvidia-mps").exists(), "what only shows the plan changes nothing"
    preflight_of(host, creates=True)
    owners = [(host.root / path).stat().st_uid for path in ("tmp/nvidia-mps/pipe", "tmp/nvidia-mps/log")]
    assert owners == [0, 0]


def test_a_configuration_that_is_refused_creates_no_directory(make_host: MakeHost) -> None:
    host = make_host(cuda_mps_scope="hots")
    preflight_of(host, creates=True)
    assert not (host.root / "tmp/nvidia-mps").exists()


def test_a_hung_mount_of_another_user_is_not_touched(make_host: MakeHost) -> None:
    host = make_host()
    taken = host.root / "tmp/nvidia-mps"
    taken.mkdir(parents=True)
    with hung_mount(taken, NOBODY):
        (domain,) = preflight_of(host, creates=True).plan.domains
    assert (domain.pipe_directory, domain.log_directory) == OURS


def test_without_a_gpu_an_unsafe_directory_is_not_said_to_be_in_use(make_host: MakeHost) -> None:
    """What is in use is looked at without care for what other users have mounted there."""
    host = make_host([])
    found = preflight_of(host)
    assert found.directories.in_use(found.config) == found.config
    put_strangers_file(host.root / "tmp/nvidia-mps/pipe")
    changed = found.config._replace(cuda_mps_pipe_directory="/run/nvidia-mps/pipe")
    assert found.directories.in_use(found.config) == changed


def test_a_file_system_that_users_have_filled_is_not_used(make_host: MakeHost) -> None:
    host = make_host()
    (host.root / "tmp").mkdir(exist_ok=True)
    with file_system_of(host.root / "tmp", most_files=20):
        fill(host.root / "tmp")
        found = preflight_of(host, creates=True)
    (domain,) = found.plan.domains
    assert (domain.pipe_directory, domain.log_directory) == OURS
    assert "No space left on device: the daemon uses /run/nvidia-mps/pipe instead" in found.all_warnings[0]


# -- what is running


def test_a_running_control_daemon_keeps_both_directories_at_a_reload(
    start_supervised: StartSupervised,
) -> None:
    _, made = start_supervised([{"kind": "v100"}])
    before = pid(made)
    open_to_all(made)
    for _ in range(2):
        assert made.reload() == []
        assert (in_effect(made), pid(made)) == ([(READY, "/tmp/nvidia-mps/pipe")], before)
    assert codes(made) == []


def test_an_unsafe_log_directory_moves_it_once_and_not_at_each_reload(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised([{"kind": "v100"}])
    made.stop()
    put_strangers_file(host.root / "tmp/nvidia-mps/log")
    again = made.start_next()
    before = pid(again)
    assert codes(again) == [DIRECTORY_TAKEN]
    assert again.reload() == []
    assert (in_effect(again), pid(again)) == ([(READY, "/tmp/nvidia-mps/pipe")], before)


def test_a_job_on_an_unsafe_directory_survives_a_reload(start_with_job: StartWithJob) -> None:
    work = start_with_job([{"kind": "v100"}])
    before = pid(work.made)
    open_to_all(work.made)
    assert work.made.reload() == []
    assert pid(work.made) == before
    assert [domain.pending for domain in work.made.snapshot.domains] == [""]
    work.end()


def test_a_reload_that_needs_another_control_daemon_does_not_fail(start_supervised: StartSupervised) -> None:
    """It cannot start where the former one served, because others can write there."""
    host, made = start_supervised(TWO, 2)
    open_to_all(made)
    host.divide(2, 2)
    made.reload()
    made.until(lambda: in_effect(made) == [(READY, "/run/nvidia-mps/pipe")])
    assert made.available == 4
    assert codes(made) == [DIRECTORY_TAKEN]


def test_a_serving_gpu_does_not_keep_another_from_its_directory(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 2, cuda_mps_scope="gpu")
    before = pid(made)
    first, second = (gpu.uuid for gpu in host.gpus)
    put_strangers_file(host.root / f"tmp/nvidia-mps/pipe/{second}")
    host.divide(2, 2)
    made.reload()
    made.until(lambda: made.available == 4)
    assert in_effect(made) == [
        (READY, f"/run/nvidia-mps/pipe/{second}"),
        (READY, f"/tmp/nvidia-mps/pipe/{first}"),
    ]
    assert pid(made) == before
    assert codes(made) == [DIRECTORY_TAKEN]


def take(directory: Path) -> None:
    """Take the place of a directory, which root has removed, as another user."""
    directory.rename(directory.with_name("removed"))
    directory.mkdir()
    os.chown(directory, NOBODY, NOBODY)


def test_a_control_daemon_is_started_elsewhere_if_its_directory_is_taken(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised([{"kind": "v100"}])
    take(host.root / "tmp/nvidia-mps")
    os.kill(pid(made) or 0, signal.SIGKILL)
    made.until(lambda: in_effect(made) == [(READY, "/run/nvidia-mps/pipe")])
    assert codes(made) == [DIRECTORY_TAKEN]
    assert made.available == 4


def test_a_hung_mount_blocks_neither_the_service_nor_a_reload(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "v100"}], cuda_mps_stop_timeout_s="0")
    taken = host.root / "tmp/nvidia-mps"
    take(taken)
    with hung_mount(taken, NOBODY):
        made.reload()
        made.supervisor.check_pipe_directories()
        os.kill(pid(made) or 0, signal.SIGKILL)
        made.until(lambda: in_effect(made) == [(READY, "/run/nvidia-mps/pipe")])


def test_a_control_daemon_that_nobody_reaches_keeps_no_directory(start_supervised: StartSupervised) -> None:
    """Another user has taken its directory: what needs it still runs on, but a new one serves elsewhere."""
    host, _ = start_supervised([{"kind": "v100"}])
    take(host.root / "tmp/nvidia-mps")
    (domain,) = domains_of(host)
    assert (domain.pipe_directory, domain.log_directory) == OURS


# -- a directory that is safe again


def begin_elsewhere(start_supervised: StartSupervised) -> tuple[SimHost, Supervised]:
    """Begin while the configured directory is another user's, who then removes it."""
    host, made = start_supervised([{"kind": "v100"}])
    made.stop()
    taken = host.root / "tmp/nvidia-mps"
    shutil.rmtree(taken)
    taken.mkdir()
    os.chown(taken, NOBODY, NOBODY)
    again = made.start_next()
    assert in_effect(again) == [(READY, "/run/nvidia-mps/pipe")]
    taken.rmdir()
    return host, again


def check_it_stays(made: Supervised, control_daemon: int | None) -> None:
    assert (in_effect(made), pid(made)) == ([(READY, "/run/nvidia-mps/pipe")], control_daemon)
    assert [domain.pending for domain in made.snapshot.domains] == [""]
    (warning,) = made.warnings
    assert warning.reason == (
        "the configured directory is safe again: the daemon uses /run/nvidia-mps/pipe instead of "
        "/tmp/nvidia-mps/pipe, and /run/nvidia-mps/log instead of /tmp/nvidia-mps/log; once the leases and "
        "jobs of its control daemon have ended, run: yunion-mps reload"
    )


def check_it_returns(made: Supervised) -> None:
    made.reload()
    made.until(lambda: in_effect(made) == [(READY, "/tmp/nvidia-mps/pipe")])
    assert codes(made) == []


def test_a_mended_directory_is_used_again_after_a_reload(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO, 2)
    open_to_all(made)
    host.divide(2, 2)
    made.reload()
    made.until(lambda: in_effect(made) == [(READY, "/run/nvidia-mps/pipe")])
    (host.root / "tmp/nvidia-mps").chmod(0o755)
    configure(host)
    made.reload()
    made.until(lambda: in_effect(made) == [(READY, "/tmp/nvidia-mps/pipe")])
    assert codes(made) == []


def test_a_control_daemon_stays_in_our_directories_at_a_restart(start_supervised: StartSupervised) -> None:
    """Leases know them, and those of the earlier daemon may not be restored yet."""
    _, made = begin_elsewhere(start_supervised)
    before = pid(made)
    again = made.start_next()
    check_it_stays(again, before)
    check_it_returns(again)


def test_a_lease_keeps_the_control_daemon_in_our_directories(start_supervised: StartSupervised) -> None:
    host, made = begin_elsewhere(start_supervised)
    before = pid(made)
    made.hold(leases_on(host.gpus[0].uuid, sharing=MPS))
    assert made.reload() == []
    check_it_stays(made, before)
    made.hold()
    check_it_returns(made)


def test_another_directory_in_the_configuration_is_used_after_leases(
    start_supervised: StartSupervised,
) -> None:
    host, made = begin_elsewhere(start_supervised)
    made.hold(leases_on(host.gpus[0].uuid, sharing=MPS))
    configure(host, cuda_mps_pipe_directory="/srv/mps/pipe")
    made.reload()
    made.until(lambda: in_effect(made) == [(READY, "/srv/mps/pipe")])


# -- their record


def test_what_a_start_and_a_reload_create_is_recorded(start_supervised: StartSupervised) -> None:
    """A purge of the package removes what is recorded, and nothing else."""
    host, made = start_supervised(TWO, 4)
    root = str(host.root)
    record = Path(made.paths.directory_record)
    assert [line.replace(root, "") for line in record.read_text().splitlines()] == [
        "above /tmp/nvidia-mps",
        "made /tmp/nvidia-mps/pipe",
        "made /tmp/nvidia-mps/log",
    ]
    configure(host, cuda_mps_log_directory="/var/log/mps")
    made.reload()
    assert f"made {root}/var/log/mps" in record.read_text().splitlines()
