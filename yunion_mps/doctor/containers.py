"""What `docker run` and its kin give a container: it gets nothing of the caller's environment by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from yunion_mps.doctor.finding import Finding, problem
from yunion_mps.doctor.variables import PIPE
from yunion_mps.models import CDI_KIND

_ENGINES = ("docker", "podman", "nerdctl")
_SHM = "/dev/shm"


def starts_container(words: Sequence[str]) -> bool:
    """Whether the command starts a container: `docker run ...`."""
    return os.path.basename(words[0]) in _ENGINES and "run" in words


def device_in(words: Sequence[str]) -> str:
    """Our device that it is given by CDI, with all that it needs; empty where it is given none."""
    given = (text.partition("=") for text in _values(words, "--device"))
    return next((name for kind, _, name in given if kind == CDI_KIND), "")


def variables_in(words: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables that it gives its container, the pipe directory as the host names it."""
    found = {}
    for text in _values(words, "-e", "--env"):
        name, equals, value = text.partition("=")
        if equals or name in own:
            found[name] = value if equals else own[name]
    place = os.path.normpath(found.get(PIPE, ""))
    for host_side, container_side in _mounts(words):
        if PIPE in found and (place == container_side or place.startswith(f"{container_side}/")):
            found[PIPE] = host_side + place[len(container_side) :]
    return found


def shared(words: Sequence[str]) -> list[Finding]:
    """What client and server must share, and do not."""
    mounts = _mounts(words)
    found = []
    if "host" not in _values(words, "--ipc") and not any(here == _SHM for here, _ in mounts):
        what = f"the container has a {_SHM} of its own, so it cannot share memory with an MPS server"
        found.append(problem(what, f"add --ipc=host, or -v {_SHM}:{_SHM}"))
    given = dict(text.partition("=")[::2] for text in _values(words, "-e", "--env"))
    place = os.path.normpath(given.get(PIPE) or "/")
    if place != "/" and not any(f"{place}/".startswith(f"{there}/") for _, there in mounts):
        found.append(problem(f"the container does not see {place}", f"add -v {place}:{place}"))
    return found


def _mounts(words: Sequence[str]) -> list[tuple[str, str]]:
    """The directories of the host, and where the container has them."""
    found = []
    for text in _values(words, "-v", "--volume"):
        parts = text.split(":")
        if len(parts) > 1:
            found.append((os.path.normpath(parts[0]), os.path.normpath(parts[1])))
    for text in _values(words, "--mount"):
        given = dict(part.partition("=")[::2] for part in text.split(","))
        here, there = given.get("source", given.get("src")), given.get("target", given.get("dst"))
        if here and there:
            found.append((os.path.normpath(here), os.path.normpath(there)))
    return found


def _values(words: Sequence[str], *options: str) -> Iterator[str]:
    """What is given with the options, as `--env X=1`, `--env=X=1` and `-eX=1` have it."""
    for place, word in enumerate(words):
        if word in options:
            yield from words[place + 1 : place + 2]
        for option in options:
            long = option.startswith("--")
            if word.startswith(f"{option}=") or (not long and word.startswith(option) and word != option):
                yield word[len(option) :].removeprefix("=")
