"""`yunion-mps terminate`: what it asks, and what it prints."""

from __future__ import annotations

import pytest
from yunion_mps.core.errors import ControlError, NotAllowedError, YunionError

from unit.cli.busy_host import OUTSIDE_MPS
from unit.cli.conftest import Cli
from unit.http.fake_services import ENDED_CLIENT, LEASE, WAITING_CLIENT, clients

WHO = "PID 4260 (python train.py) of alice"


@pytest.mark.parametrize(("options", "force"), [([], ""), (["--force"], " force")])
def test_terminate_says_how_the_client_was_ended(own_cli: Cli, options: list[str], force: str) -> None:
    out = own_cli.good("terminate", "4260", "--yes", *options)
    assert out == f"{WHO}: its MPS server disconnected it; ended by SIGTERM\n"
    assert own_cli.host.clients.done == ["clients", f"terminate 4260 for 0{force}"]


@pytest.mark.parametrize(
    ("pid", "who"),
    [
        (WAITING_CLIENT["pid"], "PID 4262 (python eval.py) of bob"),
        (ENDED_CLIENT["pid"], "PID 4261 (unknown) of an unknown user"),
    ],
    ids=["waiting", "ending"],
)
def test_terminate_describes_the_client(own_cli: Cli, pid: int, who: str) -> None:
    own_cli.host.clients.listed = clients(ENDED_CLIENT, waiting=(WAITING_CLIENT,))
    assert own_cli.good("terminate", str(pid), "--yes").startswith(f"{who}: ")


def test_answering_no_ends_nothing(own_cli: Cli) -> None:
    code, text = own_cli.answered(b"n\n", "terminate", "4260")
    assert code == 1
    assert "yunion-mps: cancelled: nothing was changed, and no job was ended\n" in text
    assert own_cli.host.clients.done == ["clients"]


def test_a_client_that_survives_is_a_failure(own_cli: Cli) -> None:
    own_cli.host.clients.ended = False
    own_cli.host.clients.how = how = "it is still running after 5 s"
    told = f"yunion-mps: {WHO}: {how}\nyunion-mps: "
    force = "kill it: yunion-mps terminate 4260 --force\n"
    assert own_cli("terminate", "4260", "--yes") == (1, "", told + force)
    check = "check whether it has ended: yunion-mps who --clients\n"
    assert own_cli("terminate", "4260", "--yes", "--force") == (1, "", told + check)


def test_the_question_says_that_a_process_is_outside_mps(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(OUTSIDE_MPS)
    code, text = own_cli.answered(b"n\n", "terminate", "4711")
    assert code == 1
    who = "PID 4711 (./old-job) of mallory"
    assert text.startswith(
        f"{who} runs outside MPS, so no MPS server disconnects it first. Terminate it? [y/N]: n"
    )


def test_a_process_that_is_no_client_is_not_ended(own_cli: Cli) -> None:
    assert own_cli("terminate", "1", "--yes").code == 1
    assert not any(done.startswith("terminate") for done in own_cli.host.clients.done)


def test_for_a_process_that_only_holds_a_lease_the_hint_is_kill(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients()
    own_cli.host.leases.listed["leases"] = [LEASE]
    told = f"yunion-mps: PID 4260 uses no GPU, but holds lease {LEASE['id'][:8]} [not_found]\n"
    told += "yunion-mps: terminate it, and the lease ends as well: kill 4260\n"
    assert own_cli("terminate", "4260", "--yes") == (1, "", told)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotAllowedError("PID 4260 is a job of bob", "hint"), 4),
        (ControlError("it does not let go", "hint"), 1),
    ],
)
def test_terminate_reports_a_refusal(own_cli: Cli, error: YunionError, code: int) -> None:
    own_cli.host.clients.refusal = error
    told = f"yunion-mps: {error} [{error.code}]\nyunion-mps: hint\n"
    assert own_cli("terminate", "4260", "--yes") == (code, "", told)


def test_the_processes_of_a_lease_are_named_before_they_are_terminated(own_cli: Cli) -> None:
    target = LEASE["id"][:8]
    code, text = own_cli.answered(b"n\n", "terminate", target)
    assert code == 1
    assert text.startswith(f"yunion-mps: {WHO}\n")
    assert f"Terminate 1 process of lease {LEASE['id']}? [y/N]: n" in text.replace("\n", " ").replace(
        "  ", " "
    )
    assert not any(done.startswith("terminate") for done in own_cli.host.clients.done)
    done = own_cli("terminate", target, "--yes", "--force", "-o", "csv")
    assert done.out.splitlines() == [
        "pid,user,command,ended,how,reason_code",
        "4260,alice,python train.py,true,its MPS server disconnected it; ended by SIGTERM,",
    ]
    assert own_cli.host.clients.done[-1] == "terminate 4260 for 0 force"


def test_processes_of_another_user_are_named(own_cli: Cli) -> None:
    own_cli.host.clients.refusal = NotAllowedError("PID 4260 is a job of bob", "hint")
    done = own_cli("terminate", "job-17", "--yes")
    told = f"yunion-mps: {WHO}: PID 4260 is a job of bob [not_allowed]\nyunion-mps: retry as root\n"
    assert (done.code, done.out) == (4, "")
    assert done.err.endswith(told)


def test_a_lease_without_processes_is_no_error(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients()
    told = f"yunion-mps: lease {LEASE['id']} has no processes\n"
    assert own_cli("terminate", "job-17", "--yes") == (0, "", told)


BUSY = "domain host: the MPS server (PID 4250) does not list its clients"


def test_a_process_that_may_be_a_client_is_terminated_only_by_force(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(errors=(BUSY,))
    done = own_cli("terminate", "4260", "--yes")
    assert (done.code, "[processes_unknown]" in done.err) == (1, True)
    assert "yunion-mps terminate 4260 --force" in done.err
    code, text = own_cli.answered(b"n\n", "terminate", "4260", "--force")
    assert (code, f"it is not known whether PID 4260 is an MPS client: {BUSY}" in text) == (1, True)
    assert "If it is one, other jobs of its MPS server may fail. Terminate PID 4260? [y/N]: n" in text
    assert "terminate 4260 for 0 force" not in own_cli.host.clients.done
    own_cli("terminate", "4260", "--force", "--yes")
    assert "terminate 4260 for 0 force" in own_cli.host.clients.done


def test_a_lease_of_which_no_process_is_known_is_a_failure(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(errors=(BUSY,))
    own_cli.host.leases.listed["leases"] = [LEASE]
    done = own_cli("terminate", LEASE["id"], "--force", "--yes")
    assert (done.code, done.out) == (1, "")
    assert (
        f"no process of lease {LEASE['id']} is known, so none was terminated [processes_unknown]" in done.err
    )
