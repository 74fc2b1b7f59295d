"""Which pipe and log directory each control daemon uses, as other users can spoil the configured ones.

Any user can create a directory in /tmp first, for example. Then the control daemon uses one that only root
can create. Nothing of another user's is used, changed or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import ShortageError, UnsafePathError
from yunion_mps.core.models import DomainPlan, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import Reason
from yunion_mps.core.settings import Config
from yunion_mps.mps.control_daemon import directories_in_use
from yunion_mps.mps.directories import find_obstacle
from yunion_mps.planning.plan import without_root

PIPE = "cuda_mps_pipe_directory"
LOG = "cuda_mps_log_directory"

#: Directories that only root can create, by the key of those that they replace.
OWN_DIRECTORIES = {PIPE: "/run/nvidia-mps/pipe", LOG: "/run/nvidia-mps/log"}
#: Those that replace even these if the administrator has opened them; systemd creates /run/yunion-mps.
_LAST_DIRECTORIES = {PIPE: "/run/yunion-mps/nvidia-mps/pipe", LOG: "/run/yunion-mps/nvidia-mps/log"}


class _Choice(NamedTuple):
    """The directory that a domain uses, and what kept it from using the configured one, if anything."""

    key: str
    configured: str
    used: str
    obstacle: UnsafePathError | None


class _Choices(NamedTuple):
    pipe: _Choice
    log: _Choice


class DomainDirectories:
    """Decides once for each domain; the decision stays until the next reload, or until a start is refused.

    Both directories are decided together. A running control daemon keeps those that it has, whatever they are
    like: it may have jobs. For a new one, the first safe directory is used: the configured one, or else ours.
    """

    def __init__(
        self,
        config: Config,
        paths: Paths,
        *,
        creates: bool,
        find_in_use: Callable[[str], tuple[str, ...]] = directories_in_use,
    ) -> None:
        """With `creates`, directories are created as they are chosen, before another user can.

        find_in_use: returns the directories of the control daemon that serves a pipe directory
        """
        self._find_in_use = find_in_use
        self._written = {PIPE: config.cuda_mps_pipe_directory, LOG: config.cuda_mps_log_directory}
        self._paths = paths
        self._creates = creates
        #: The choices of each domain, by its configured pipe directory.
        self._choices: dict[str, _Choices] = {}

    def place(self, plan: Plan) -> Plan:
        """Return the plan, whose directories are the configured ones, with those that its domains use."""
        domains = tuple(self._placed(domain) for domain in plan.domains)
        parked = tuple(self._placed(domain) for domain in plan.parked)
        return plan._replace(domains=domains, parked=parked)

    def refuse(self, domain: DomainPlan) -> bool:
        """Choose again for a new domain (below the root) that cannot start because of its directories.

        Returns whether it gets others.
        """
        refused = without_root(domain, self._paths)
        for configured, choices in self._choices.items():
            if choices.pipe.used == refused.pipe_directory:
                again = self._choose(configured, choices.log.configured)
                self._choices[configured] = again
                return (again.pipe.used, again.log.used) != (choices.pipe.used, choices.log.used)
        return False

    def warnings(self) -> tuple[Reason, ...]:
        """Return a warning for each obstacle: what is used instead, and what mends it."""
        replaced: dict[tuple[str, str], list[_Choice]] = {}
        for choices in self._choices.values():
            for choice in choices:
                if choice.obstacle:
                    place = (choice.obstacle.message, choice.obstacle.hint)
                    replaced.setdefault(place, []).append(choice)
        warnings = []
        for (what, hint), replacements in replaced.items():
            uses = ", and ".join(self._describe(replacements))
            warnings.append(Reason(f"{what}: the daemon uses {uses}; {hint}", reasons.DIRECTORY_TAKEN))
        return tuple(warnings)

    def in_use(self, config: Config) -> Config:
        """Return the configuration with our directories instead of those that no domain uses."""
        values: dict[str, Any] = {}
        for number, key in enumerate((PIPE, LOG)):
            chosen = [choices[number] for choices in self._choices.values()]
            if chosen and all(choice.obstacle for choice in chosen):
                values[key] = OWN_DIRECTORIES[key]
        return config._replace(**values)

    def _placed(self, domain: DomainPlan) -> DomainPlan:
        configured = domain.pipe_directory
        if configured not in self._choices:
            self._choices[configured] = self._choose(configured, domain.log_directory)
        pipe, log = self._choices[configured]
        return domain._replace(pipe_directory=pipe.used, log_directory=log.used)

    def _choose(self, pipe_directory: str, log_directory: str) -> _Choices:
        pipe = self._first(PIPE, pipe_directory, lambda path: path in self._find_in_use(path))
        place = self._paths.under(pipe.used)
        log = self._first(LOG, log_directory, lambda path: path in self._find_in_use(place))
        return _Choices(pipe, log)

    def _first(self, key: str, configured: str, is_kept: Callable[[str], bool]) -> _Choice:
        """Return the first directory that is kept or safe; the configured one if none is, which is reported.

        is_kept: whether a running control daemon has the directory (below the root)
        """
        below = configured[len(self._written[key]) :]
        others = (OWN_DIRECTORIES[key] + below, _LAST_DIRECTORIES[key] + below)
        first_obstacle = None
        for directory in (configured, *others):
            path = self._paths.under(directory)
            obstacle = find_obstacle(path, make=self._creates)
            if obstacle is None or _is_kept_or_unknown(is_kept, path):
                return _Choice(key, configured, directory, first_obstacle)
            first_obstacle = first_obstacle or obstacle
        return _Choice(key, configured, configured, None)

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


def _is_kept_or_unknown(is_kept: Callable[[str], bool], path: str) -> bool:
    """Whether a control daemon has the directory; in a shortage, it may have it, so it is not left."""
    try:
        return is_kept(path)
    except ShortageError:
        return True
