"""The command line that runs a container: the options of `docker run` and `podman run`, read and written.

Both parse options as Go's pflag does, and none after the image, where similar words belong to the command or
are the value of another option. `words` are what follows `run`.

Source: docker run and podman-run(1); github.com/spf13/pflag, README.md, section "Command line flag syntax".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from yunion_mps.core.models import CDI_KIND

_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_ENGINES = ("docker", "podman", "nerdctl")
#: Options of `run` without a value, of docker 26 and 28 and podman 4 (their `run --help`).
_PLAIN = frozenset({
    "detach", "disable-content-trust", "help", "init", "interactive", "no-healthcheck", "oom-kill-disable",
    "privileged", "publish-all", "quiet", "read-only", "rm", "sig-proxy", "tty", "use-api-socket",
    "env-host", "http-proxy", "no-hostname", "no-hosts", "passwd", "read-only-tmpfs", "replace", "rmi",
    "rootfs", "tls-verify", "unsetenv-all",
})  # fmt: skip
_PLAIN_LETTERS = frozenset("diPqt")
#: The long names of options that are read here.
_LONG_NAMES = {"e": "env", "v": "volume"}


def words_after_run(argv: Sequence[str]) -> Sequence[str] | None:
    """Return what follows `docker run`; None if the command starts no container."""
    if os.path.basename(argv[0]) not in _ENGINES or "run" not in argv:
        return None
    return argv[argv.index("run") + 1 :]


def option_values(words: Sequence[str], name: str) -> list[str]:
    """Return all values of the option with this long name."""
    return [value for option, value in _options(words) if option == name]


def set_variables(words: Sequence[str]) -> set[str]:
    """Return which variables the options set or remove (`--env X`)."""
    return {value.partition("=")[0] for value in option_values(words, "env")}


def variables_in(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the container's variables, with the pipe directory's path on the host."""
    variables = {}
    for text in option_values(words, "env"):
        name, has_value, value = text.partition("=")
        if has_value:
            variables[name] = value
        elif name in environ:
            variables[name] = environ[name]
    directory = os.path.normpath(variables.get(_PIPE, ""))
    for source, target in mounts_in(words):
        if _PIPE in variables and (directory == target or directory.startswith(f"{target}/")):
            variables[_PIPE] = source + directory[len(target) :]
    return variables


def device_in(words: Sequence[str]) -> str:
    """Return the name of our CDI device that the container requests; empty if there is none."""
    for text in option_values(words, "device"):
        kind, _, name = text.partition("=")
        if kind == CDI_KIND:
            return name
    return ""


def mounts_in(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the mounted directories, as (path on the host, path in the container)."""
    mounts: list[tuple[str, str]] = []
    for text in option_values(words, "volume"):
        parts = text.split(":")
        if len(parts) > 1:
            mounts.append((os.path.normpath(parts[0]), os.path.normpath(parts[1])))
    for text in option_values(words, "mount"):
        fields: dict[str, str] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            fields[name] = value
        source = fields.get("source", fields.get("src"))
        target = fields.get("target", fields.get("dst"))
        if source and target:
            mounts.append((os.path.normpath(source), os.path.normpath(target)))
    return mounts


def mount_words(path: str) -> list[str]:
    """Return options that mount a directory at the same path, whatever characters it contains."""
    source = _mount_field(f"source={path}")
    target = _mount_field(f"target={path}")
    return ["--mount", f"type=bind,{source},{target}"]


def _mount_field(text: str) -> str:
    """Return a field of `--mount`, which engines read with Go's encoding/csv."""
    if not set(text).intersection(',"\r\n'):
        return text
    return '"{}"'.format(text.replace('"', '""'))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option before the image with its value, "" if it has none."""
    remaining = iter(words)
    for word in remaining:
        if word == "--" or len(word) < 2 or not word.startswith("-"):
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name, value if equals or name in _PLAIN else next(remaining, "")
            continue
        for index, letter in enumerate(word[1:], start=2):
            remainder = word[index:]
            if remainder.startswith("="):
                yield _LONG_NAMES.get(letter, letter), remainder[1:]
                break
            if letter not in _PLAIN_LETTERS:
                yield _LONG_NAMES.get(letter, letter), remainder or next(remaining, "")
                break
