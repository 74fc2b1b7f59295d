"""`yunion-mps daemon-reexec`: waits for the next program, and tells how it went."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

from yunion_mps import __version__
from yunion_mps.errors import HostError
from yunion_mps.models import Event

from unit.cli.conftest import Cli, Done
from unit.http.server_host import PATIENCE_S, eventually
from unit.http.test_hand_over import go_on, hand_over

LOOK = "see: journalctl -u yunion-mps-daemon"


def run_anew(cli: Cli, between: Callable[[], Any] = lambda: None) -> Done:
    """The command, while the server gives way to the next once it was told to."""

    def give_way() -> None:
        eventually(lambda: cli.host.changes.done == ["reexec"], "the request")
        hand_over(cli.host).result(PATIENCE_S)
        between()
        go_on(cli.host)

    daemon = threading.Thread(target=give_way)
    daemon.start()
    done = cli("daemon-reexec")
    daemon.join()
    return done


def test_it_tells_how_long_it_took_once_the_next_program_answers(own: Cli) -> None:
    code, out, err = run_anew(own)
    assert (code, err) == (0, "")
    how = rf"with PID {os.getpid()} as before; it took \d+\.\d\d s\n"
    told = rf"The daemon \({__version__}\) was re-executed, {how}"
    assert re.fullmatch(told, out)


def test_where_the_new_program_would_not_start_it_says_why(own: Cli) -> None:
    own.host.changes.error = HostError("the new program would not start: no", "correct that")
    told = "yunion-mps: the new program would not start: no\nyunion-mps: correct that\n"
    assert own("daemon-reexec") == (1, "", told)


def test_where_the_old_program_had_to_go_on_it_says_so(own: Cli) -> None:
    event = Event("error", "daemon", "yunion-mps-daemon", "it cannot be run anew: no", "", "this one goes on")
    own.host.record(event._replace(what="long ago"))
    done = run_anew(own, lambda: own.host.record(event))
    told = f"yunion-mps: it cannot be run anew: no\nyunion-mps: this one goes on; {LOOK}\n"
    assert done == (1, "", told)


def test_a_daemon_that_was_restarted_instead_is_told_from_one_that_runs_anew(own: Cli) -> None:
    def restart() -> None:
        own.host.service._pid = 1
        own.host.snapshot = own.host.snapshot._replace(version=2)

    wrong = f"the daemon was restarted: its PID was {os.getpid()}, and is 1"
    assert run_anew(own, restart) == (1, "", f"yunion-mps: {wrong}\nyunion-mps: {LOOK}\n")
