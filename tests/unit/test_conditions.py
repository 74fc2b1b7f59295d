"""Each condition is said alike by status, doctor, the metrics, the page, the kubelet plugin and Slurm.

Each row makes a condition happen in the state in effect: a GPU, a domain, a lease or a process. Everything
between that and the outputs is the real code. A kind of condition without a row fails a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.conditions import Condition, shown
from yunion_mps.core.enums import (
    ABOUT_BUDGET,
    ABOUT_CDI_FILES,
    ABOUT_COMPUTE_MODE,
    ABOUT_CONFIGURATION,
    ABOUT_DEVICES,
    ABOUT_DIVISION,
    ABOUT_DOMAIN,
    ABOUT_DRIVER,
    ABOUT_ENTRY,
    ABOUT_EVENT_LOG,
    ABOUT_GPU,
    ABOUT_LEASE,
    ABOUT_METRICS_FILE,
    ABOUT_MIG_LAYOUT,
    ABOUT_PIPE_DIRECTORY,
    ABOUT_PROCESS,
    ABOUT_RECORD,
    ABOUT_REQUEST,
    ABOUT_SERVER,
    ABOUT_SERVERS_OF_USER,
    ABOUT_SERVICE,
    ABOUT_SETTING,
    ABOUT_TIME_SLICE,
    ABOUT_WAY_OF_SHARING,
    BROKEN,
    CONDITION_KINDS,
    DOMAIN_STATES,
    IMPAIRED,
    NOTICE,
    PENDING,
    PROBLEM,
    READY,
    REFUSED,
    SERVER_FAULT,
    TIME_SLICING,
    WARNING,
)
from yunion_mps.core.models import Event, Gpu, Holder, Lease, MissingGpu, Snapshot
from yunion_mps.core.reasons import GPU_NEEDS, LAYOUT_NEEDS, LAYOUT_WAITS, LIMITS_PENDING, Reason
from yunion_mps.core.waits import NO_USERS, Servers, Users, wait_reason
from yunion_mps.doctor.checks import Lazy
from yunion_mps.kubernetes.offered import unhealthy_cause
from yunion_mps.leases.ledger import Ledger
from yunion_mps.service.queries import Queries
from yunion_mps.slurm.gres_conf import why_no_jobs
from yunion_mps.supervisor.condition_log import ConditionLog
from yunion_mps.supervisor.host_conditions import PendingSetting
from yunion_mps.views.overview import HostAnswers, HostOverview, page
from yunion_mps.views.reload_rows import pending_rows

from unit import builders
from unit.cli.busy_host import OUTSIDE_MPS, OVER_BUDGET
from unit.doctor.hosts import check_findings, host_of
from unit.http.fake_services import (
    CLIENT,
    LEASE,
    QUEUED_REQUEST,
    SERVER,
    WAITING_CLIENT,
    clients,
    services_of_status,
)
from unit.http.snapshots import H100, IN_MIG_MODE, MIG_ENTRIES, P40, in_instances, snapshot, with_conditions
from unit.metrics.metric_facts import facts, value

#: The GPU of most rows: it enforces budgets, and has the mode that MPS should have.
GPU = H100._replace(
    pci_address="0000:06:00.0", compute_mode="Exclusive_Process", render_node="/dev/dri/renderD128"
)
OTHER = GPU._replace(pci_address="0000:07:00.0", uuid="GPU-22222222-2222-3333-4444-555555555555", minor=2)
WHY = "why"
ALL_HEALTHY, NONE_HEALTHY = "all", "none"
#: The checks of doctor that report conditions of the daemon.
CHECKS = (
    "daemon",
    "GPUs",
    "MIG",
    "compute mode",
    "budgets",
    "user switching",
    "pipe directory",
    "outside MPS",
)


class Host(NamedTuple):
    """A host with something amiss: its state in effect, its leases, and what processes do."""

    snapshot: Snapshot
    leased: Sequence[Lease] = ()
    leases: Sequence[Any] = ()
    waiting: Sequence[Any] = ()
    clients: Any = clients(servers=())


class Row(NamedTuple):
    """What must be said of a condition.

    `healthy` is which of the host's devices the kubelet plugin offers, and `drained` the reason code with
    which Slurm's health check drains the node; empty if the node runs jobs.
    """

    name: str
    kind: str
    code: str
    level: str
    make: Callable[[], Host]
    healthy: str = ALL_HEALTHY
    drained: str = ""


def healthy_host(**more: Any) -> Host:
    return Host(with_conditions(snapshot(GPU), **more))


def host_reporting(kind: str, status: str, code: str, subject: str = "") -> Callable[[], Host]:
    """What another part of the daemon has found; integration/test_noticed_problems makes it happen."""
    return partial(healthy_host, reported=[Condition(kind, subject, status, Reason(WHY, code))])


def gpu_with(**changed: Any) -> Host:
    return Host(snapshot(GPU._replace(**changed)))


def changed_gpu(**changed: Any) -> Host:
    """A GPU that has changed since it was divided."""
    inventory = builders.inventory(GPU._replace(**changed))
    return Host(with_conditions(snapshot(GPU)._replace(inventory=inventory)))


def with_domain(**changed: Any) -> Host:
    sound = snapshot(GPU)
    domain = sound.domains[0]._replace(**changed)
    return Host(with_conditions(sound._replace(domains=(domain,))))


def with_layout(code: str, *, serves: bool) -> Host:
    """A GPU whose MIG layout is not in effect, and whose instances serve or are not there."""
    whole, *instances = in_instances(IN_MIG_MODE, "3g.40gb", "3g.40gb")
    other = P40._replace(compute_capability=(7, 0))
    host = snapshot(other, whole, *instances, entries=MIG_ENTRIES)
    if not serves:
        of_other = tuple(device for device in host.plan.devices if device.gpu_uuid == other.uuid)
        plan = host.plan._replace(devices=of_other, direct=())
        host = host._replace(plan=plan, inventory=builders.inventory(other, whole))
    return Host(with_conditions(host, layouts={IN_MIG_MODE.uuid: Reason(WHY, code)}))


def with_missing_entry() -> Host:
    sound = snapshot(GPU)
    missing = MissingGpu("0a:00.0", "devices.yml:4", Reason("this host has no such GPU", reasons.GPU_MISSING))
    return Host(with_conditions(sound._replace(plan=sound.plan._replace(missing=(missing,)))))


def with_waiting_gpu() -> Host:
    """A GPU with a pool, none of which is leased again until its leases have ended."""
    sound = snapshot(GPU, entries=[builders.entry("06:00.0", 0)._replace(memory_unit_mib=1024)])
    waits = {
        str(GPU.uuid): Reason("the change to time-slicing waits for lease a to end", reasons.LEASES_PENDING)
    }
    return Host(with_conditions(sound._replace(plan=sound.plan._replace(pending=waits))))


def with_former_division() -> Host:
    """A GPU in 4 devices, one of which is leased as it was when there were 2."""
    former, sound = snapshot(GPU, replicas=2), snapshot(GPU)
    return Host(sound, leased=[Lease("a", former.plan.devices[:1], Holder("name", 0, name="job"), 0.0)])


def with_pending_setting(
    about: str, users: Users, code: str = reasons.SETTING_PENDING, **domain: Any
) -> Host:
    """A GPU with a setting that waits, and its domain."""
    waits = wait_reason("the restoration of its time slice default", users, code)
    sound = snapshot(GPU)
    sound = sound._replace(domains=(sound.domains[0]._replace(**domain),))
    return Host(with_conditions(sound, settings=[PendingSetting(about, str(GPU.uuid), waits)]))


def with_gpu_not_served() -> Host:
    """The running control daemon serves only one of two GPUs."""
    sound = snapshot(GPU, OTHER)
    serving = sound.domains[0].plan.for_gpus([str(GPU.uuid)])
    domain = sound.domains[0]._replace(plan=serving)
    return Host(with_conditions(sound._replace(domains=(domain,))))


def with_sliced_gpu_in_wrong_mode() -> Host:
    """A time-sliced GPU on which another program has set Exclusive_Process."""
    entry = builders.entry("06:00.0", 2)._replace(sharing=TIME_SLICING)
    sound = snapshot(GPU._replace(compute_mode="Default"), entries=[entry])
    inventory = builders.inventory(GPU)
    return Host(with_conditions(sound._replace(inventory=inventory)))


def with_sliced_use() -> Host:
    entry = builders.entry("06:00.0", 2)._replace(sharing=TIME_SLICING)
    uses = {**CLIENT, "mps": None, "server": None, "device": None, "lease": None, "gpus": ["06:00.0"]}
    return Host(
        snapshot(GPU._replace(compute_mode="Default"), entries=[entry]), clients=clients(uses, servers=())
    )


def on_gpu(row: Any) -> Any:
    """The example of an answer, as if it were about the GPU of these rows."""
    text = repr(row).replace("00:06.0", "06:00.0")
    return eval(text)


def rows() -> Iterator[Row]:
    drained = {"healthy": NONE_HEALTHY}
    yield Row(
        "leftovers", ABOUT_SERVICE, reasons.CONTROL_DAEMON_LEFT, NOTICE, partial(healthy_host, leftovers=WHY)
    )
    hung = Reason(WHY, reasons.DRIVER_HUNG)
    yield Row("driver", ABOUT_SERVICE, reasons.DRIVER_HUNG, NOTICE, partial(healthy_host, driver=hung))
    for state in DOMAIN_STATES:
        if state != READY:
            silent = Reason(WHY, reasons.CONTROL_DAEMON_SILENT)
            code = reasons.SERVER_START_FAILED if state == "degraded" else reasons.DOMAIN_NOT_READY
            yield Row(
                name=f"domain {state}",
                kind=ABOUT_DOMAIN,
                code=silent.code,
                level=PROBLEM,
                make=partial(with_domain, state=state, reason=silent),
                drained=code,
                **drained,
            )
    waits = {"pending": WHY, "waits_for": (4250,)}
    yield Row("limits", ABOUT_DOMAIN, LIMITS_PENDING, PENDING, partial(with_domain, **waits))
    failing = {"failing_users": {0: Reason(WHY, reasons.SERVER_START_FAILED)}}
    yield Row(
        "servers of a user", ABOUT_SERVERS_OF_USER, reasons.SERVER_START_FAILED, WARNING,
        partial(with_domain, **failing),
    )  # fmt: skip
    for code in sorted(GPU_NEEDS):
        why = Reason(WHY, code)
        make = partial(changed_gpu, reason=why)
        yield Row(f"GPU {code}", ABOUT_GPU, code, PROBLEM, make, drained=code, **drained)
    yield Row(
        "a GPU that is not served", ABOUT_DEVICES, reasons.GPU_NOT_SERVED, PROBLEM, with_gpu_not_served,
        healthy="06:00.0", drained=reasons.GPU_NOT_SERVED,
    )  # fmt: skip
    yield Row(
        "a sliced GPU in another mode", ABOUT_DEVICES, reasons.COMPUTE_MODE_CHANGED, PROBLEM,
        with_sliced_gpu_in_wrong_mode, drained=reasons.COMPUTE_MODE_CHANGED, **drained,
    )  # fmt: skip
    for code in sorted(LAYOUT_WAITS | LAYOUT_NEEDS):
        level = PENDING if code in LAYOUT_WAITS else PROBLEM
        serving = partial(with_layout, code, serves=True)
        empty = partial(with_layout, code, serves=False)
        yield Row(f"layout {code}", ABOUT_MIG_LAYOUT, code, level, serving, drained=code)
        yield Row(f"layout {code} of no use", ABOUT_MIG_LAYOUT, code, PROBLEM, empty, drained=code)
    changed = reasons.COMPUTE_MODE_CHANGED
    default = partial(gpu_with, compute_mode="Default")
    yield Row("a mode that was changed", ABOUT_COMPUTE_MODE, changed, WARNING, default)
    prohibited = partial(changed_gpu, compute_mode="Prohibited")
    yield Row("a prohibited GPU", ABOUT_COMPUTE_MODE, changed, PROBLEM, prohibited)
    fixed = partial(gpu_with, compute_mode="Default", mode_is_fixed=True)
    yield Row("a mode that is fixed", ABOUT_COMPUTE_MODE, reasons.COMPUTE_MODE_UNSUPPORTED, WARNING, fixed)
    refused = host_reporting(ABOUT_TIME_SLICE, REFUSED, reasons.TIME_SLICE_REFUSED, "06:00.0")
    yield Row("a time slice", ABOUT_TIME_SLICE, reasons.TIME_SLICE_REFUSED, WARNING, refused)
    refused = host_reporting(ABOUT_SETTING, REFUSED, reasons.COMPUTE_MODE_REFUSED, "06:00.0")
    yield Row("another setting", ABOUT_SETTING, reasons.COMPUTE_MODE_REFUSED, WARNING, refused)
    for about in (ABOUT_COMPUTE_MODE, ABOUT_TIME_SLICE, ABOUT_SETTING):
        code = reasons.SETTING_NOT_RESTORED
        refused = host_reporting(about, REFUSED, code, "06:00.0")
        yield Row(f"a {about} that is not restored", about, code, WARNING, refused)
        for code, users in (
            (reasons.SETTING_PENDING, Users(leases=("lease job of root",))),
            (reasons.SETTING_IN_USE, Users(processes=(7,))),
        ):
            yield Row(
                f"a {about} with {code}", about, code, PENDING,
                partial(with_pending_setting, about, users, code),
            )  # fmt: skip
    old = partial(gpu_with, compute_capability=(6, 1))
    yield Row("an old GPU", ABOUT_BUDGET, reasons.BUDGET_NOT_ENFORCED, WARNING, old)
    yield Row("an entry", ABOUT_ENTRY, reasons.GPU_MISSING, PROBLEM, with_missing_entry)
    yield Row(
        "a GPU that waits", ABOUT_WAY_OF_SHARING, reasons.LEASES_PENDING, PENDING, with_waiting_gpu,
        drained=reasons.LEASES_PENDING,
    )  # fmt: skip
    yield Row(
        "a former division", ABOUT_DIVISION, reasons.LEASES_PENDING, PENDING, with_former_division,
        healthy="some", drained=reasons.LEASES_PENDING,
    )  # fmt: skip
    for kind, status, code in (
        (ABOUT_CONFIGURATION, IMPAIRED, reasons.CONFIGURATION_IGNORED),
        (ABOUT_CONFIGURATION, IMPAIRED, reasons.PATH_OUTDATED),
        (ABOUT_CONFIGURATION, IMPAIRED, reasons.MULTIUSER_UNSUPPORTED),
        (ABOUT_CONFIGURATION, IMPAIRED, reasons.DIRECTORY_TAKEN),
        (ABOUT_PIPE_DIRECTORY, BROKEN, reasons.PIPE_DIRECTORY),
        (ABOUT_RECORD, IMPAIRED, reasons.RECORD_DAMAGED),
        (ABOUT_RECORD, IMPAIRED, reasons.STATE_FILE_DAMAGED),
        (ABOUT_RECORD, IMPAIRED, reasons.MIG_RECORD_DAMAGED),
        (ABOUT_EVENT_LOG, IMPAIRED, reasons.EVENTS_NOT_WRITTEN),
        (ABOUT_DRIVER, IMPAIRED, reasons.SHORTAGE),
        (ABOUT_CDI_FILES, IMPAIRED, reasons.CDI_DIRECTORY_FAILED),
        (ABOUT_CDI_FILES, IMPAIRED, reasons.CDI_DRIVER_FAILED),
        (ABOUT_METRICS_FILE, IMPAIRED, reasons.METRICS_FILE_FAILED),
        (ABOUT_LEASE, BROKEN, reasons.LEASE_UNREADABLE),
    ):
        level = PROBLEM if status == BROKEN else WARNING
        yield Row(f"{kind} {code}", kind, code, level, host_reporting(kind, status, code))
    yield from rows_of_use()


def rows_of_use() -> Iterator[Row]:
    """Conditions of leases and processes."""
    lease = on_gpu(LEASE)
    left = {**lease, "environment": {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}}
    outdated = partial(Host, snapshot(GPU), leases=[left])
    yield Row("an outdated lease", ABOUT_LEASE, reasons.LEASE_OUTDATED, PROBLEM, outdated)
    fault = clients(servers=({**SERVER, "state": SERVER_FAULT},))
    failed = partial(Host, snapshot(GPU), clients=fault)
    yield Row("a server", ABOUT_SERVER, reasons.SERVER_FAILED, PROBLEM, failed)
    too_much = clients(on_gpu({**OVER_BUDGET, "memory_by_gpu_mib": [90000], "memory_used_mib": 90000}))
    over = partial(Host, snapshot(GPU), leases=[lease], clients=too_much)
    yield Row("over budget", ABOUT_PROCESS, reasons.OVER_BUDGET, PROBLEM, over)
    bypassing = clients(on_gpu(OUTSIDE_MPS))
    outside = partial(Host, snapshot(GPU), clients=bypassing)
    yield Row("outside MPS", ABOUT_PROCESS, reasons.PROCESS_OUTSIDE_MPS, PROBLEM, outside)
    asking = clients(waiting=(on_gpu(WAITING_CLIENT),))
    client = partial(Host, snapshot(GPU), clients=asking)
    yield Row("a waiting client", ABOUT_PROCESS, reasons.CLIENT_WAITING, WARNING, client)
    unleased = reasons.PROCESS_WITHOUT_LEASE
    yield Row("unleased use", ABOUT_PROCESS, unleased, WARNING, with_sliced_use)
    queued = {**QUEUED_REQUEST, "reason": WHY, "reason_code": reasons.OTHER_USER}
    request = partial(Host, snapshot(GPU), waiting=[queued])
    yield Row("a request", ABOUT_REQUEST, reasons.OTHER_USER, WARNING, request)


ROWS = list(rows())


class Outputs(NamedTuple):
    """What each output says of a host."""

    status: Any
    devices: Sequence[Any]
    metrics: Any
    page: Any
    findings: Mapping[str, Sequence[Any]]
    conditions: Sequence[Condition]


def outputs_of(host: Host, root: Path) -> Outputs:
    queries = Queries(lambda: host.snapshot, 0.0, 4200, ledger=Ledger(host.leased))
    service = services_of_status(queries, host.leases, host.waiting)
    status, devices, gpus = service.of(host.clients), queries.all_devices(), queries.gpus()["gpus"]
    answers = HostAnswers(status, gpus, devices, host.leases, host.waiting, host.clients)
    doctor = host_of(root, *host.snapshot.inventory.gpus, snapshot=host.snapshot)
    doctor.status = Lazy(lambda: status)
    doctor.gpus = Lazy(lambda: gpus)
    return Outputs(
        status=status,
        devices=devices,
        metrics=facts(host.snapshot, status=status, gpus=gpus, devices=devices),
        page=page(HostOverview.of(answers)),
        findings={check: check_findings(doctor, check) for check in CHECKS},
        conditions=queries.conditions(),
    )


def test_each_kind_of_condition_has_a_row() -> None:
    assert {row.kind for row in ROWS} == set(CONDITION_KINDS)


def test_a_healthy_host_has_no_condition(tmp_path: Path) -> None:
    outputs = outputs_of(Host(snapshot(GPU)), tmp_path)
    assert (outputs.status["problems"], outputs.page["problems"], outputs.conditions) == ([], [], ())
    bad = [one for some in outputs.findings.values() for one in some if one.level in (PROBLEM, WARNING)]
    assert bad == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_output_says_the_same_of_a_condition(row: Row, tmp_path: Path) -> None:
    outputs = outputs_of(row.make(), tmp_path)
    problems = outputs.status["problems"]
    (problem,) = (one for one in problems if (one["kind"], one["code"]) == (row.kind, row.code))
    assert problem["level"] == row.level
    degrades = row.level == PROBLEM
    assert (outputs.status["state"] in ("degraded", "failed")) >= degrades
    by_level = Counter((one["level"], one["code"]) for one in problems)
    for (level, code), number in by_level.items():
        assert value(outputs.metrics, "yunion_mps_problems", level=level, reason=code) == number
    titles = {(one["title"], one["text"]) for one in outputs.page["problems"]}
    assert (row.level.capitalize(), problem["text"]) in titles
    expected = PROBLEM if row.level in (NOTICE, PROBLEM) else WARNING
    findings = [one for some in outputs.findings.values() for one in some if one.code == row.code]
    assert {finding.level for finding in findings} == {expected}, outputs.findings
    assert problem["text"] in [finding.what for finding in findings]


#: Kinds of conditions whose begin and end are events; of settings, those that the driver refuses.
WITH_EVENTS = {ABOUT_GPU, ABOUT_ENTRY, ABOUT_MIG_LAYOUT, ABOUT_PIPE_DIRECTORY, ABOUT_CDI_FILES}
SETTINGS = {ABOUT_COMPUTE_MODE, ABOUT_TIME_SLICE, ABOUT_SETTING}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_begins_to_be_wrong_is_an_event_with_the_same_cause(row: Row) -> None:
    snapshot_of_row = row.make().snapshot
    expected = []
    for condition in snapshot_of_row.conditions:
        is_refused = condition.kind in SETTINGS and condition.status == REFUSED
        if condition.kind in WITH_EVENTS or is_refused:
            expected.append((condition.reason, condition.reason.code))
    events: list[Event] = []
    ConditionLog(events.append).note(snapshot_of_row, is_settled=True)
    assert [(event.cause or event.what, event.code) for event in events] == expected


BOB, JOB = Users(("lease a of bob",)), Users(("lease job of root",))
SERVER_4250 = Users(servers=(Servers((4250,)),))
PROCESS = Users(processes=(7,))


def host_with_restoration(make: Callable[[], Host], users: Users, gpu: Gpu = GPU, **facts: Any) -> Host:
    """The host, with the restoration of a compute mode that waits for these users."""
    host = make()
    why = wait_reason("the restoration of its compute mode Default", users, reasons.SETTING_PENDING)
    settings = [PendingSetting(ABOUT_COMPUTE_MODE, str(gpu.uuid), why)]
    return host._replace(snapshot=with_conditions(host.snapshot, settings=settings, **facts))


def beside_layout(code: str) -> Host:
    """The same of a GPU whose MIG layout is not in effect, for the reason with this code."""
    layouts = {IN_MIG_MODE.uuid: Reason(WHY, code)}
    return host_with_restoration(
        partial(with_layout, code, serves=True), SERVER_4250, IN_MIG_MODE, layouts=layouts
    )


LAYOUTS = {IN_MIG_MODE.uuid: Reason(WHY, reasons.MIG_RESET_REQUIRED)}


def with_layout_and_wait(*, of_instance: bool) -> Host:
    """A GPU that waits for a layout and, itself or a leased instance, for another way of sharing."""
    host = with_layout(reasons.MIG_RESET_REQUIRED, serves=True).snapshot
    _, whole, instance, *_ = host.inventory.gpus
    uuid = (instance if of_instance else whole).uuid
    host = host._replace(plan=host.plan._replace(pending={str(uuid): Reason(WHY, reasons.LEASES_PENDING)}))
    devices = tuple(device for device in host.plan.devices if device.gpu_uuid == uuid)
    leased = [Lease("a", devices, Holder("name", 0, name="job"), 0.0)] if devices else []
    return Host(with_conditions(host, layouts=LAYOUTS), leased=leased)


CAUSES = {
    **{row.name: row.make for row in ROWS},
    "way of sharing of an instance": partial(with_layout_and_wait, of_instance=True),
    "setting beside a layout and a way of sharing": partial(
        host_with_restoration,
        partial(with_layout_and_wait, of_instance=False),
        JOB,
        IN_MIG_MODE,
        layouts=LAYOUTS,
    ),
    "setting beside a way of sharing": partial(host_with_restoration, with_waiting_gpu, BOB),
    "setting beside a former division": partial(host_with_restoration, with_former_division, JOB),
    "setting beside a layout in use": partial(beside_layout, reasons.MIG_IN_USE),
    "setting beside a layout": partial(beside_layout, reasons.MIG_RESET_REQUIRED),
}


@pytest.mark.parametrize("make", CAUSES.values(), ids=CAUSES)
def test_what_a_condition_follows_from_is_in_the_same_list(make: Callable[[], Host]) -> None:
    host = make()
    queries = Queries(lambda: host.snapshot, 0.0, 4200, ledger=Ledger(host.leased))
    for conditions in (host.snapshot.conditions, queries.conditions()):
        identifiers = {condition.identifier for condition in conditions}
        assert {condition.follows_from for condition in conditions} <= {"", *identifiers}


@pytest.mark.parametrize(
    ("host", "codes"),
    [
        (host_with_restoration(healthy_host, JOB), [reasons.SETTING_PENDING]),
        (host_with_restoration(healthy_host, NO_USERS, leftovers=WHY), [reasons.CONTROL_DAEMON_LEFT]),
        (host_with_restoration(partial(with_domain, pending=WHY), SERVER_4250), [LIMITS_PENDING]),
        (host_with_restoration(partial(with_domain, pending=WHY), NO_USERS), [LIMITS_PENDING]),
        (
            host_with_restoration(partial(with_domain, pending=WHY), PROCESS),
            [LIMITS_PENDING, reasons.SETTING_PENDING],
        ),
        (host_with_restoration(with_waiting_gpu, BOB), [reasons.LEASES_PENDING]),
        (host_with_restoration(with_waiting_gpu, PROCESS), [reasons.LEASES_PENDING, reasons.SETTING_PENDING]),
        (host_with_restoration(with_former_division, JOB), [reasons.LEASES_PENDING]),
        (
            host_with_restoration(with_former_division, PROCESS),
            [reasons.LEASES_PENDING, reasons.SETTING_PENDING],
        ),
        (host_with_restoration(partial(changed_gpu, compute_mode="Default"), JOB), [reasons.SETTING_PENDING]),
        (
            host_with_restoration(partial(changed_gpu, compute_mode="Prohibited"), JOB),
            [reasons.COMPUTE_MODE_CHANGED, reasons.SETTING_PENDING],
        ),
        (
            beside_layout(reasons.MIG_IN_USE),
            [reasons.MIG_IN_USE],
        ),
        (
            beside_layout(reasons.MIG_RESET_REQUIRED),
            [reasons.MIG_RESET_REQUIRED, reasons.SETTING_PENDING],
        ),
    ],
)
def test_what_a_setting_waits_for_is_said_once(host: Host, codes: Sequence[str]) -> None:
    queries = Queries(lambda: host.snapshot, 0.0, 4200, ledger=Ledger(host.leased))
    assert [condition.reason.code for condition in shown(queries.conditions())] == codes
    waits = queries.ledger.lease_waits(host.snapshot.plan.devices)
    rows = pending_rows(host.snapshot, host.snapshot.plan, waits, (), lambda _: ())
    settings = [row["pending"] for row in rows if "its compute mode Default" in row["pending"]]
    assert len(settings) == codes.count(reasons.SETTING_PENDING)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_schedulers_see_a_condition_in_the_devices_and_problems(row: Row, tmp_path: Path) -> None:
    outputs = outputs_of(row.make(), tmp_path)
    devices = {device["addr"]: device for device in outputs.devices}
    healthy = {name for name, device in devices.items() if not unhealthy_cause(device, ())}
    if row.healthy == ALL_HEALTHY:
        assert healthy == set(devices)
    elif row.healthy == NONE_HEALTHY:
        assert healthy == set()
    else:
        assert healthy
        assert healthy < set(devices)
    addresses = [*devices, *(gpu["addr"] for gpu in outputs.metrics.gpus)]
    why = why_no_jobs(addresses, outputs.devices, outputs.status["problems"])
    assert (why.code if why else "") == row.drained
