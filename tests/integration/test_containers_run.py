"""`yunion-mps run --podman` as people use it: in a queue, at a terminal, interrupted; a lease of a name."""

from __future__ import annotations

import signal

import pytest

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, given, take, who_waits
from integration.podman_host import IMAGE, Podman, files_of, mps
from waiting import readable

#: One GPU, divided by four: `run` and the client take nothing of the reference case, which has no limits.
pytestmark = pytest.mark.gpus({"kind": "v100"})

RUN = ("yunion-mps", "run", "--podman")
LOOP = "trap 'echo ended; exit 3' TERM; trap 'echo heard' USR1; echo begun; while :; do sleep 0.1; done"


def test_a_queued_run_gets_what_a_container_leaves_ctrl_c_ends_its_wait(
    ready_daemon: Daemon, podman: Podman
) -> None:
    host = ready_daemon.host
    podman.good("run", "--detach", "--name", "trainer", *mps("all"), IMAGE, "sleep", "300")

    def waiting() -> int:
        return len(who_waits(ready_daemon))

    inside = ["sh", "-c", "echo $YUNION_MPS_DEVICE"]
    patient = host.popen([*RUN, "--wait", "--gpu", "00:06.0", "--", "--rm", IMAGE, *inside], stderr=-1)
    eventually(lambda: waiting() == 1, "that it waits")
    hasty = host.popen([*RUN, "--wait", "--", "--rm", IMAGE, "true"], stderr=-1)
    eventually(lambda: waiting() == 2, "that both wait")
    hasty.send_signal(signal.SIGINT)
    hasty.communicate()
    assert hasty.returncode == 130
    eventually(lambda: waiting() == 1, "that it has left the queue")
    podman.good("rm", "--force", "--time", "0", "trainer")
    told, _ = patient.communicate()
    assert (patient.returncode, told) == (0, f"{ADDRESSES[0]}\n")
    eventually(lambda: given(ready_daemon) == [], "the end of the lease")


def test_input_signals_and_terminal_are_the_container_s(ready_daemon: Daemon, podman: Podman) -> None:
    host = ready_daemon.host
    assert podman.good("ps", "--quiet") == ""
    done = host.run([*RUN, "--", "--rm", "-i", IMAGE, "cat"], input="hello\n")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    command = " ".join([*RUN, "--", "--rm", "-it", IMAGE, "sh -c 'test -t 0 && test -t 1 && exit 7'"])
    done = host.run(["script", "--quiet", "--return", "--command", command, "/dev/null"])
    assert done.returncode == 7, done.stdout
    begun = host.popen([*RUN, "--", "--rm", IMAGE, "sh", "-c", LOOP])
    assert begun.stdout is not None
    assert begun.stdout.readline() == "begun\n"
    while not readable(begun.stdout, 0.1):
        begun.send_signal(signal.SIGUSR1)  # podman hands signals on from a moment after its container's start
    begun.send_signal(signal.SIGTERM)
    assert set(begun.communicate()[0].splitlines()) == {"heard", "ended"}
    assert begun.returncode == 3
    eventually(lambda: given(ready_daemon) == [], "the end of the lease")


def test_a_name_s_lease_that_has_ended_neither_ends_nor_begins_containers(
    ready_daemon: Daemon, podman: Podman
) -> None:
    lease = take(ready_daemon, f"devices={ADDRESSES[1]}&holder.name=job-17&holder.ttl_s=600")
    for name in ("trainer", "teacher"):
        podman.good("run", "--detach", "--name", name, "--device", lease["cdi"], IMAGE, "sleep", "300")
    assert given(ready_daemon) == [ADDRESSES[1]], "both share it"
    podman.good("rm", "--force", "--time", "0", "teacher")
    assert given(ready_daemon) == [ADDRESSES[1]]
    assert ready_daemon.host.run(["yunion-mps", "lease", "release", "job-17"]).returncode == 0
    assert (given(ready_daemon), files_of(ready_daemon.host)) == ([], ["yunion-mps.json"])
    assert podman.good("ps", "--format", "{{.Names}}") == "trainer"
    refused = podman("restart", "--time", "0", "trainer")
    assert f"unresolvable CDI devices {lease['cdi']}" in refused.stderr
