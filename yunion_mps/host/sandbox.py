"""Where the service's unit lets the daemon write: systemd's mount namespace of yunion-mps-daemon.service.

Which of several settings counts was measured with systemd 252 and 257, and is described in systemd.exec(5),
"Sandboxing": the longest path counts; of equal paths, the strictest; below an inaccessible directory nothing
is accessible.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from yunion_mps.core.paths import Paths
from yunion_mps.host.files import read_text
from yunion_mps.host.processes import output_of

UNIT = "yunion-mps-daemon.service"

#: What systemd does to a path, the strictest first.
INACCESSIBLE, BOUND, READ_ONLY, WRITABLE, PRIVATE = range(5)

#: The settings in the unit as shipped; used on hosts where neither systemd nor its files have the unit.
SHIPPED = {
    "ProtectSystem": ("full",),
    "ProtectHome": ("read-only",),
    "StateDirectory": ("yunion-mps",),
    "RuntimeDirectory": ("yunion-mps",),
    "PrivateTmp": ("no",),
}
#: The settings that are lists: later lines add to them, and an empty one clears them.
_LISTS = (
    "ReadWritePaths",
    "ReadOnlyPaths",
    "InaccessiblePaths",
    "TemporaryFileSystem",
    "BindPaths",
    "BindReadOnlyPaths",
    "StateDirectory",
    "RuntimeDirectory",
    "LogsDirectory",
    "CacheDirectory",
)
#: All settings that are read.
SETTINGS = ("ProtectSystem", "ProtectHome", "PrivateTmp", *_LISTS)

#: Directories of unit files, the most important first.
_UNIT_DIRECTORIES = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")
_NO = ("", "no", "false", "off", "0")
_HOMES = ("/home", "/root", "/run/user")
#: What ProtectHome makes of them, by its value; everything else makes them inaccessible.
_HOME_MODES = {"read-only": READ_ONLY, "tmpfs": PRIVATE}
_PROTECTED = {"strict": ("/",), "full": ("/usr", "/boot", "/efi", "/etc")}
#: Where the directories that a unit asks for are created.
_CREATED = {
    "StateDirectory": "/var/lib",
    "RuntimeDirectory": "/run",
    "LogsDirectory": "/var/log",
    "CacheDirectory": "/var/cache",
}
_TIMEOUT_S = 10.0
#: As many symlinks are followed in a path, as the kernel does (path_resolution(7)).
_MAX_LINKS = 40

Settings = Mapping[str, tuple[str, ...]]


class Rule(NamedTuple):
    """What systemd does to a directory and everything below it."""

    path: str
    #: One of `INACCESSIBLE` to `PRIVATE`.
    mode: int
    #: The setting that says so: `ProtectHome=read-only`.
    setting: str


class Sandbox:
    """The rules of the unit, for paths below a root."""

    def __init__(self, settings: Settings, root: str = "/") -> None:
        self._paths = Paths(root)
        self._settings = settings
        self._rules = sorted(self._make_rules(), key=lambda rule: (len(rule.path), rule.mode))

    def rule_for(self, path: str) -> Rule | None:
        """Return the rule that keeps the daemon from sharing files in a directory; None if there is none.

        Its mode is INACCESSIBLE, READ_ONLY, or PRIVATE if other processes do not see what the daemon writes
        there. Symlinks in `path` are followed.
        """
        real = self.resolve(path)
        effective: Rule | None = None
        for rule in self._rules:
            if not _is_below(real, rule.path):
                continue
            if rule.mode == INACCESSIBLE:
                return rule
            is_same = effective is not None and effective.path == rule.path
            is_hidden = effective is not None and effective.mode == PRIVATE and rule.mode != BOUND
            if not is_same and not is_hidden:
                effective = rule
        return effective if effective and effective.mode in (READ_ONLY, PRIVATE) else None

    def resolve(self, path: str) -> str:
        """Return the path without symlinks, below the root; an absolute symlink is the host's own, too."""
        root = self._paths.root
        resolved = root
        names = path.split("/")
        links = 0
        while names:
            name = names.pop(0)
            if name == "..":
                resolved = os.path.dirname(resolved) if resolved != root else root
            if name in ("", ".", ".."):
                continue
            place = os.path.join(resolved, name)
            links += os.path.islink(place)
            if not os.path.islink(place) or links > _MAX_LINKS:
                resolved = place
                continue
            target = os.readlink(place)
            if target.startswith("/"):
                target = self.shown(target)
                resolved = root
            names = [*target.split("/"), *names]
        return resolved

    def shown(self, path: str) -> str:
        """Return an absolute path as the host itself names it, without our root."""
        root = self._paths.root
        return path[len(root) :] if root != "/" and _is_below(path, root) else path

    def creates(self, path: str) -> str:
        """Return the setting by which systemd creates this directory itself; empty if none does."""
        for setting, parent in _CREATED.items():
            for name in self._settings.get(setting, ()):
                if f"{parent}/{name.partition(':')[0]}" == path:
                    return f"{setting}={name}"
        return ""

    def _make_rules(self) -> Iterator[Rule]:
        yield from self._protections()
        for setting, mode in (
            ("InaccessiblePaths", INACCESSIBLE),
            ("ReadOnlyPaths", READ_ONLY),
            ("ReadWritePaths", WRITABLE),
            ("TemporaryFileSystem", PRIVATE),
        ):
            for value in self._settings.get(setting, ()):
                path = value.lstrip("-+").partition(":")[0]
                if os.path.lexists(self._paths.under(path)):  # systemd ignores what does not exist, or fails
                    yield Rule(self.resolve(path), mode, f"{setting}={value}")
        for setting, mode in (("BindPaths", BOUND), ("BindReadOnlyPaths", READ_ONLY)):
            for value in self._settings.get(setting, ()):
                source, _, options = value.lstrip("-").partition(":")
                yield Rule(self.resolve(options.partition(":")[0] or source), mode, f"{setting}={value}")
        for setting, parent in _CREATED.items():
            for value in self._settings.get(setting, ()):
                yield Rule(self.resolve(f"{parent}/{value.partition(':')[0]}"), BOUND, f"{setting}={value}")

    def _protections(self) -> Iterator[Rule]:
        system = self._word("ProtectSystem")
        home = self._word("ProtectHome")
        tmp = self._word("PrivateTmp")
        if system not in _NO:
            protected = _PROTECTED.get(system, ("/usr", "/boot", "/efi"))
            for path in protected:
                yield Rule(self.resolve(path), READ_ONLY, f"ProtectSystem={system}")
        if system == "strict":
            for path in ("/dev", "/proc", "/sys"):
                yield Rule(self.resolve(path), WRITABLE, "")
        if home not in _NO:
            mode = _HOME_MODES.get(home, INACCESSIBLE)
            for path in _HOMES:
                yield Rule(self.resolve(path), mode, f"ProtectHome={home}")
        if tmp not in _NO:
            for path in ("/tmp", "/var/tmp"):
                yield Rule(self.resolve(path), PRIVATE, f"PrivateTmp={tmp}")

    def _word(self, setting: str) -> str:
        words = self._settings.get(setting, ())
        return words[0] if words else ""


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")


def read_sandbox(paths: Paths) -> Sandbox:
    """Return the sandbox of the unit as systemd has loaded it, with drop-ins; otherwise as its files say."""
    if paths.root == "/" and os.path.isdir("/run/systemd/system"):
        properties = ",".join(("LoadState", *SETTINGS))
        shown = output_of(["systemctl", "show", UNIT, f"--property={properties}"], _TIMEOUT_S)
        if "LoadState=loaded" in shown.splitlines():
            return Sandbox(parse_unit_settings([shown]))
    return Sandbox(_settings_of_files(paths), paths.root)


def _settings_of_files(paths: Paths) -> Settings:
    """Read the unit's file and drop-ins; if there is no file, it is taken to be as shipped."""
    file = ""
    drop_ins: dict[str, str] = {}
    for directory in map(paths.under, _UNIT_DIRECTORIES):
        if not file and os.path.isfile(f"{directory}/{UNIT}"):
            file = f"{directory}/{UNIT}"
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{directory}/{UNIT}.d"):
                if name.endswith(".conf"):
                    drop_ins.setdefault(name, f"{directory}/{UNIT}.d/{name}")
    texts = [read_text(drop_ins[name]) for name in sorted(drop_ins)]
    if file:
        return parse_unit_settings([read_text(file), *texts])
    return parse_unit_settings(texts, SHIPPED)


def parse_unit_settings(texts: Iterable[str], before: Settings | None = None) -> Settings:
    """Return the settings of unit files, or of `systemctl show`, which has the same form.

    before: the settings that these add to.
    """
    settings = dict(before or {})
    for text in texts:
        for line in text.splitlines():
            name, equals, value = line.strip().partition("=")
            if not equals or name not in SETTINGS:
                continue
            words: tuple[str, ...] = ()
            with contextlib.suppress(ValueError):  # an open quote, which systemd ignores, too
                words = tuple(shlex.split(value))
            is_added = name in _LISTS and words
            settings[name] = (*settings.get(name, ()), *words) if is_added else words
    return settings


def is_in_unit(pid: int | str) -> bool:
    """Return whether the process (or "self") belongs to the service's unit, by its control group."""
    groups = read_text(f"/proc/{pid}/cgroup").splitlines()
    return any(f"/{UNIT}/" in f"{group}/" for group in groups)
