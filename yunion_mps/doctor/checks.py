"""All checks, in the order in which a report of nothing but good news lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from yunion_mps.doctor import control, daemon, driver, environment, gpus, places, security, selftest, servers
from yunion_mps.doctor.running import Check

#: What is looked at on every host.
OF_THE_HOST = (
    Check("daemon", daemon.daemon),
    Check("configuration", daemon.configuration),
    Check("driver", driver.driver),
    Check("programs", driver.programs),
    Check("device nodes", driver.nodes),
    Check("GPUs", gpus.gpus),
    Check("MIG", gpus.mig),
    Check("vGPU", gpus.vgpu),
    Check("budgets", gpus.budgets),
    Check("compute mode", gpus.compute_mode),
    Check("control daemon", control.control_daemons),
    Check("control daemon answers", control.answers),
    Check("other control daemons", control.others),
    Check("orphaned servers", control.orphans),
    Check("MPS servers", servers.starts),
    Check("client limit", servers.client_limit),
    Check("users", servers.user_switching),
    Check("past MPS", servers.strangers),
    Check("pipe directory", places.pipe_directory),
    Check("cleaning", places.cleaning),
    Check("disk space", places.space),
    Check("/dev/shm", places.shm),
    Check("SELinux and AppArmor", security.denials),
    Check("logins", environment.of_logins),
)


def checks(
    own: Mapping[str, str], pid: int | None, command: Sequence[str], *, selftest: bool
) -> tuple[Check, ...]:
    """The checks of the host, of a process, of a command with the environment `own`, and on a GPU."""
    more = []
    if pid is not None:
        more.append(Check("environment", partial(environment.of_process, pid=pid)))
    if command:
        more.append(Check("environment", partial(environment.of_command, own=own, words=command)))
    if selftest:
        more.append(_SELFTEST)
    return (*OF_THE_HOST, *more)


_SELFTEST = Check("selftest", selftest.selftest, selftest.TIMES_AS_LONG + 1)
