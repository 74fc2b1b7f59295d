"""All checks, in the order in which a report of nothing but good news lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from yunion_mps.doctor import daemon, driver, environment, files, gpus, mps, selftest
from yunion_mps.doctor.report import Check

#: Each check is declared once, by `@check(NAME)`, in one of these.
MODULES = (daemon, driver, gpus, mps, files, environment)
OF_THE_HOST = tuple(one for module in MODULES for one in vars(module).values() if isinstance(one, Check))


def checks(
    own: Mapping[str, str], pid: int | None, command: Sequence[str], *, selftest_too: bool
) -> tuple[Check, ...]:
    """The checks of the host, of a process, of a command with the environment `own`, and on a GPU."""
    more = []
    if pid is not None:
        more.append(Check("environment", partial(environment.of_process, pid=pid)))
    if command:
        more.append(Check("environment", partial(environment.of_command, own=own, words=command)))
    if selftest_too:
        more.append(selftest.selftest)
    return (*OF_THE_HOST, *more)
