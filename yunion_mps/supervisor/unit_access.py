"""Directories of the daemon that its unit does not let it write, or share: problems of the configuration.

The daemon would fail at each start, and systemd would start it again for ever. A daemon that was started
without the unit, by hand or in a container, is not affected; while such a daemon runs, nothing is refused.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from yunion_mps.core.errors import Problem
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import METRICS_FILE_FAILED, Reason
from yunion_mps.core.settings import Config
from yunion_mps.host.lock import holder_of_lock
from yunion_mps.host.sandbox import INACCESSIBLE, PRIVATE, UNIT, Rule, Sandbox, is_in_unit, read_sandbox
from yunion_mps.mps.directories import is_on_read_only
from yunion_mps.supervisor.domain_directories import OWN_DIRECTORIES

#: The directories of the state file, and of the socket; no key sets them.
_FIXED = ("/var/lib/yunion-mps", "/run/yunion-mps")


class _Directory(NamedTuple):
    """A directory of the daemon, as configured; `key` is empty if no key sets it.

    `is_shared`: other processes have to see it.
    """

    path: str
    key: str = ""
    is_shared: bool = True


def unit_problems(paths: Paths, config: Config) -> list[Problem]:
    """Return the directories that the service could not use, unless a daemon runs without its unit."""
    running = holder_of_lock(paths)
    if not config.enable_cuda_mps or (running is not None and not is_in_unit(running)):
        return []
    sandbox = read_sandbox(paths)
    problems = []
    for directory in _directories(config):
        problem = _problem(directory, sandbox, paths, config)
        if problem:
            problems.append(problem)
    return problems


def own_unit_problems(paths: Paths, config: Config) -> list[Problem]:
    """Return `unit_problems` if this process belongs to the unit, and cannot write to one of the directories.

    Usually, it can, and systemd need not be asked.
    """
    if not is_in_unit("self"):
        return []
    directories = [paths.under(directory.path) for directory in _directories(config)]
    return unit_problems(paths, config) if any(map(is_on_read_only, directories)) else []


def unit_warnings(paths: Paths, config: Config) -> list[Reason]:
    """Return the files that the service could not write, but without which it continues."""
    running = holder_of_lock(paths)
    file = config.metrics_textfile
    if not (config.enable_cuda_mps and file) or (running is not None and not is_in_unit(running)):
        return []
    sandbox = read_sandbox(paths)
    rule = sandbox.rule_for(os.path.dirname(file))
    if rule is None:
        return []
    shown = sandbox.shown(sandbox.resolve(os.path.dirname(file)))
    forbids = f"in {shown}, {_forbids(rule)}"
    return [Reason(f"metrics_textfile is {file}, {forbids}: {_permit(rule, shown)}", METRICS_FILE_FAILED)]


def _directories(config: Config) -> list[_Directory]:
    directories = [_Directory(path) for path in _FIXED]
    if not config.devices or any(entry.uses_mps for entry in config.devices):
        directories.append(_Directory(config.cuda_mps_pipe_directory, "cuda_mps_pipe_directory"))
        directories.append(
            _Directory(config.cuda_mps_log_directory, "cuda_mps_log_directory", is_shared=False)
        )
    return directories


def _problem(directory: _Directory, sandbox: Sandbox, paths: Paths, config: Config) -> Problem | None:
    """Return why the service cannot use the directory; None if it can."""
    path = paths.under(directory.path)
    created_by = sandbox.creates(directory.path)
    if created_by and os.path.islink(path):
        message = f"is a symlink, so systemd does not start {UNIT} ({created_by})"
        target = os.path.realpath(path)
        hint = f"replace it by a directory, and mount its contents there: mount --bind {target} {path}"
        return Problem(path, None, message, hint)
    rule = sandbox.rule_for(directory.path)
    if rule is None or (rule.mode == PRIVATE and not directory.is_shared):
        return None
    real = sandbox.resolve(directory.path)
    shown = sandbox.shown(real)
    leads = f" (a symlink to {shown})" if real != path else ""
    forbids = _forbids(rule)
    if not directory.key:
        return Problem(path, None, f"leads to {shown}, {forbids}", _permit(rule, shown))
    at = config.sources[directory.key]
    file = paths.host_conf if at.line is None else at.file
    hint = f"write another directory, for example {OWN_DIRECTORIES[directory.key]}; or {_permit(rule, shown)}"
    return Problem(file, at.line, f"{directory.key} is {directory.path}{leads}, {forbids}", hint)


def _forbids(rule: Rule) -> str:
    if rule.mode == PRIVATE:
        return f"where other programs do not see what {UNIT} writes ({rule.setting})"
    return f"which {UNIT} may not write to ({rule.setting})"


def _permit(rule: Rule, directory: str) -> str:
    """Return what permits the service to use the directory."""
    edit = "systemctl edit yunion-mps-daemon"
    if rule.mode in (INACCESSIBLE, PRIVATE):
        return f"change this setting: {edit}"
    return f"permit it: mkdir -p {directory}; {edit}, with the lines [Service] and ReadWritePaths={directory}"
