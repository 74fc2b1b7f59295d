"""Which pipe and log directory each control daemon uses, as other users can spoil the configured ones.

Any user can create a directory in /tmp first, for example. Then the control daemon uses one that only root
can create. Nothing of another user's is used, changed or removed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import UnsafePathError
from yunion_mps.core.models import DomainPlan, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import Reason
from yunion_mps.core.settings import Config
from yunion_mps.mps.control_daemon import directories_in_use
from yunion_mps.mps.directories import find_obstacle
from yunion_mps.mps.directory_record import DirectoryRecord
from yunion_mps.mps.processes import FindProcesses, MpsProcess, our_processes
from yunion_mps.planning.plan import without_root

PIPE = "cuda_mps_pipe_directory"
LOG = "cuda_mps_log_directory"

#: Directories that only root can create, by the key of those that they replace.
OWN_DIRECTORIES = {PIPE: "/run/nvidia-mps/pipe", LOG: "/run/nvidia-mps/log"}
#: Those that replace even these if the administrator has opened them; systemd creates /run/yunion-mps.
_LAST_DIRECTORIES = {PIPE: "/run/yunion-mps/nvidia-mps/pipe", LOG: "/run/yunion-mps/nvidia-mps/log"}

#: What is said of a configured directory that is safe again, while a running control daemon uses ours.
_MENDED = "the configured directory is safe again"
_HOW_TO_LEAVE = "once the leases and jobs of its control daemon have ended, run: yunion-mps reload"


class _Choice(NamedTuple):
    """The directory that a domain uses, and what keeps it from using the configured one, if anything."""

    key: str
    configured: str
    used: str
    obstacle: UnsafePathError | None

    @property
    def is_replaced(self) -> bool:
        return self.used != self.configured


class _Choices(NamedTuple):
    pipe: _Choice
    log: _Choice

    @property
    def replaced(self) -> int:
        """How many of the configured directories are not used."""
        return self.pipe.is_replaced + self.log.is_replaced


class _Decision(NamedTuple):
    #: The directories of a new control daemon.
    new: _Choices
    #: Those of the running one, if it has others, of ours.
    kept: _Choices | None
    #: Whether the running one is to be replaced by a new one.
    is_left: bool = False

    @property
    def used(self) -> _Choices:
        return self.new if self.is_left or self.kept is None else self.kept


class DomainDirectories:
    """Decides once for each domain; the decision stays until the next reload, or until a start is refused.

    Both directories are decided together. A running control daemon keeps those that it has, whatever they are
    like: leases and jobs know them. For a new one, the first safe directory is used: the configured one, or
    else ours. So one that serves from ours stays there when the configured directory is safe again, until a
    reload finds it without leases and jobs (`leave_mended`).
    """

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        creates: bool,
        find_in_use: Callable[[str], tuple[str, ...]] = directories_in_use,
        find_running: FindProcesses = our_processes,
    ) -> None:
        """With `creates`, directories are created as they are chosen, before another user can.

        find_in_use: returns the directories of the control daemon that serves a pipe directory
        find_running: returns our control daemons and MPS servers
        """
        self._find_in_use = find_in_use
        self._find_running = find_running
        self._written = {PIPE: config.cuda_mps_pipe_directory, LOG: config.cuda_mps_log_directory}
        self._paths = paths
        self._creates = creates
        self._record = DirectoryRecord(paths.directory_record)
        #: The decision for each domain, by its configured pipe directory.
        self._decisions: dict[str, _Decision] = {}

    def place(self, plan: Plan) -> Plan:
        """Return the plan, whose directories are the configured ones, with those that its domains use.

        Raises ShortageError if it cannot be found out what is running.
        """
        find_running = functools.lru_cache(self._find_running)
        domains = tuple(self._placed(domain, find_running) for domain in plan.domains)
        parked = tuple(self._placed(domain, find_running) for domain in plan.parked)
        return plan._replace(domains=domains, parked=parked)

    def leave_mended(self, is_held: Callable[[str], bool]) -> None:
        """Let running control daemons be replaced by ones in configured directories that are safe again.

        is_held: whether a lease or a job needs the control daemon of this pipe directory (below the root)
        """
        for configured, decision in self._decisions.items():
            current = decision.kept
            if current is None:
                continue
            is_mended = decision.new.replaced < current.replaced
            is_left = is_mended and not is_held(self._paths.under(current.pipe.used))
            self._decisions[configured] = decision._replace(is_left=is_left)

    def refuse(self, domain: DomainPlan) -> bool:
        """Choose again for a domain (below the root) that cannot start, if other users spoil its directories.

        Returns whether it gets others. Raises ShortageError as `place`.
        """
        refused = without_root(domain, self._paths)
        for configured, decision in self._decisions.items():
            former = decision.used
            if former.pipe.used == refused.pipe_directory and self._is_spoilt(former):
                domain = domain._replace(pipe_directory=configured, log_directory=former.log.configured)
                again = self._decide(domain, self._find_running)
                self._decisions[configured] = again
                return (again.used.pipe.used, again.used.log.used) != (former.pipe.used, former.log.used)
        return False

    def warnings(self) -> tuple[Reason, ...]:
        """Return a warning for each obstacle: what is used instead, and what mends it."""
        replaced: dict[tuple[str, str], list[_Choice]] = {}
        for decision in self._decisions.values():
            for choice in decision.used:
                if choice.is_replaced:
                    place = (_MENDED, _HOW_TO_LEAVE)
                    if choice.obstacle:
                        place = (choice.obstacle.message, choice.obstacle.hint)
                    replaced.setdefault(place, []).append(choice)
        warnings = []
        for (message, hint), replacements in replaced.items():
            uses = ", and ".join(self._describe(replacements))
            warnings.append(Reason(f"{message}: the daemon uses {uses}; {hint}", reasons.DIRECTORY_TAKEN))
        return tuple(warnings)

    def in_use(self, config: Config) -> Config:
        """Return the configuration with our directories instead of those that no domain would use."""
        values: dict[str, Any] = {}
        for number, key in enumerate((PIPE, LOG)):
            chosen = [decision.used[number] for decision in self._decisions.values()]
            is_replaced = all(choice.is_replaced for choice in chosen)
            if not chosen:  # there is no GPU yet
                is_replaced = find_obstacle(self._paths.under(self._written[key])) is not None
            if is_replaced:
                values[key] = OWN_DIRECTORIES[key]
        return config._replace(**values)

    def _placed(self, domain: DomainPlan, find_running: FindProcesses) -> DomainPlan:
        configured = domain.pipe_directory
        if configured not in self._decisions:
            self._decisions[configured] = self._decide(domain, find_running)
        pipe, log = self._decisions[configured].used
        return domain._replace(pipe_directory=pipe.used, log_directory=log.used)

    def _decide(self, domain: DomainPlan, find_running: FindProcesses) -> _Decision:
        """Decide for a domain, whose directories are the configured ones."""
        pipe = self._first(PIPE, domain.pipe_directory, lambda path: path in self._find_in_use(path))
        place = self._paths.under(pipe.used)
        log = self._first(LOG, domain.log_directory, lambda path: path in self._find_in_use(place))
        new = _Choices(pipe, log)
        return _Decision(new, self._kept(domain, new, find_running))

    def _kept(self, domain: DomainPlan, new: _Choices, find_running: FindProcesses) -> _Choices | None:
        """Return the directories of the domain's running control daemon if a new one would use others.

        One that cannot be reached any more, because of what other users have done there, keeps nothing.
        """
        running: dict[str, MpsProcess] = {}
        for process in find_running():
            if not process.is_server and not set(process.gpu_uuids).isdisjoint(domain.gpu_uuids):
                running[process.pipe_directory] = process
        for directory in self._candidates(PIPE, domain.pipe_directory):
            path = self._paths.under(directory)
            if path not in running:
                continue
            if find_obstacle(path) and path not in self._find_in_use(path):
                continue
            pipe = new.pipe._replace(used=directory)
            log = new.log
            for log_directory in self._candidates(LOG, domain.log_directory):
                if self._paths.under(log_directory) == running[path].log_directory:
                    log = log._replace(used=log_directory)
            return None if (pipe, log) == new else _Choices(pipe, log)
        return None

    def _is_spoilt(self, choices: _Choices) -> bool:
        return any(find_obstacle(self._paths.under(choice.used), for_start=True) for choice in choices)

    def _first(self, key: str, configured: str, is_kept: Callable[[str], bool]) -> _Choice:
        """Return the first directory that is kept or safe; the configured one if none is, which is reported.

        is_kept: whether a running control daemon has the directory (below the root)
        """
        first_obstacle = None
        for directory in self._candidates(key, configured):
            path = self._paths.under(directory)
            obstacle = find_obstacle(path, make=self._creates, for_start=True, record=self._record)
            if obstacle is None or is_kept(path):
                return _Choice(key, configured, directory, first_obstacle)
            first_obstacle = first_obstacle or obstacle
        return _Choice(key, configured, configured, None)

    def _candidates(self, key: str, configured: str) -> tuple[str, ...]:
        """Return the configured directory, and ours that replace it, the preferred one first."""
        below = configured[len(self._written[key]) :]
        return configured, OWN_DIRECTORIES[key] + below, _LAST_DIRECTORIES[key] + below

    def _describe(self, replacements: Iterable[_Choice]) -> list[str]:
        """Return what replaces what; many domains are described by the directory above theirs."""
        uses: list[str] = []
        chosen: dict[str, list[_Choice]] = {}
        for choice in replacements:
            chosen.setdefault(choice.key, []).append(choice)
        for key, choices in chosen.items():
            used, configured = choices[0].used, choices[0].configured
            below = configured[len(self._written[key]) :]
            if len(choices) > 1:
                used, configured = used.removesuffix(below), configured.removesuffix(below)
            uses.append(f"{used} instead of {configured}")
        return uses
