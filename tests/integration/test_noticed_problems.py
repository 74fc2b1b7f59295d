"""Problems that parts of the daemon notice by themselves: each is made to happen, and is in `status`.

tests/unit/test_conditions.py compares what all outputs say of each.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.paths import Paths

from integration.daemon_host import Daemon, eventually
from integration.lease_host import take

Fault = Callable[[Daemon], None]


def start(daemon: Daemon) -> None:
    daemon.start().wait_ready()


def ignore_a_setting(daemon: Daemon) -> None:
    daemon.configure(web_listen="somewhere")
    start(daemon)


def request_what_the_program_lacks(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_multiuser=True)
    start(daemon)


def renumber_render_nodes(daemon: Daemon) -> None:
    host = daemon.host
    entry = "- path: /dev/dri/renderD{}\n  type: NVIDIA_MPS\n  virtual_number: 2\n"
    entries = [entry.format(gpu.description.render) for gpu in host.gpus]
    (host.root / "etc/yunion/host_container_device.yml").write_text("devices:\n" + "".join(entries))
    start(daemon)
    daemon.stop()
    host.gpus[0].remove()
    host.renumber()
    start(daemon)


def keep_the_record_of_gpus_from_being_written(daemon: Daemon) -> None:
    record = daemon.host.root / "var/lib/yunion-mps/served-gpus.json"
    record.mkdir(parents=True)
    start(daemon)


def damage_the_state_file(daemon: Daemon) -> None:
    """Also remove the copies of its records, as a reboot does."""
    start(daemon)
    daemon.stop()
    shutil.rmtree(daemon.host.root / "run/yunion-mps")
    (daemon.host.root / "var/lib/yunion-mps/state.db").write_bytes(b"no database" * 1000)
    start(daemon)


def keep_events_from_being_written(daemon: Daemon) -> None:
    start(daemon)
    with closing(sqlite3.connect(Paths(str(daemon.host.root)).store)) as file, file:
        file.execute("CREATE TRIGGER refuse BEFORE INSERT ON event BEGIN SELECT RAISE(ABORT, 'full'); END")
    daemon.ask("POST", "/v1/leases", "holder.name=a&holder.ttl_s=600")  # its grant is an event


def put_a_file_in_the_place_of_cdi_s_directory(daemon: Daemon) -> None:
    directory = daemon.host.root / "run/cdi"
    directory.parent.mkdir(exist_ok=True)
    directory.write_text("")
    start(daemon)


def break_nvidia_s_specification(daemon: Daemon) -> None:
    directory = daemon.host.root / "etc/cdi"
    directory.mkdir()
    (directory / "nvidia.yaml").write_text("a: [")
    start(daemon)


def name_a_missing_directory_for_metrics(daemon: Daemon) -> None:
    daemon.configure(metrics_textfile="/srv/missing/mps.prom")
    start(daemon)


def make_a_lease_unreadable(daemon: Daemon) -> None:
    start(daemon)
    take(daemon, "holder.name=a&holder.ttl_s=600&allow_unlimited=true")
    daemon.kill()
    with closing(sqlite3.connect(Paths(str(daemon.host.root)).store)) as file, file:
        file.execute("UPDATE lease SET value = '{'")
    start(daemon)


FAULTS: dict[str, Fault] = {
    reasons.CONFIGURATION_IGNORED: ignore_a_setting,
    reasons.MULTIUSER_UNSUPPORTED: request_what_the_program_lacks,
    reasons.PATH_OUTDATED: renumber_render_nodes,
    reasons.RECORD_DAMAGED: keep_the_record_of_gpus_from_being_written,
    reasons.STATE_FILE_DAMAGED: damage_the_state_file,
    reasons.EVENTS_NOT_WRITTEN: keep_events_from_being_written,
    reasons.CDI_DIRECTORY_FAILED: put_a_file_in_the_place_of_cdi_s_directory,
    reasons.CDI_DRIVER_FAILED: break_nvidia_s_specification,
    reasons.METRICS_FILE_FAILED: name_a_missing_directory_for_metrics,
    reasons.LEASE_UNREADABLE: make_a_lease_unreadable,
}


@pytest.mark.gpus({"kind": "v100"}, {"kind": "a10"})
@pytest.mark.parametrize("code", FAULTS)
def test_what_a_part_of_the_daemon_notices_is_in_status(daemon: Daemon, code: str) -> None:
    FAULTS[code](daemon)
    eventually(lambda: code in [problem["code"] for problem in daemon.status()["problems"]], code)
