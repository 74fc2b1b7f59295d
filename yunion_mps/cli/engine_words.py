"""What stands before the image in `docker run`, and what an engine without CDI is told there.

Both read their options as Go's pflag does, and nothing after the image: options of the same look are the
command's there, or may be the value of another option.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

#: The options without a value, of docker 26 and 28 and podman 4 (their `run --help`); all others have one.
_PLAIN = frozenset({
    "detach", "disable-content-trust", "help", "init", "interactive", "no-healthcheck", "oom-kill-disable",
    "privileged", "publish-all", "quiet", "read-only", "rm", "sig-proxy", "tty", "use-api-socket",
    "env-host", "http-proxy", "no-hostname", "no-hosts", "passwd", "read-only-tmpfs", "replace", "rmi",
    "rootfs", "tls-verify", "unsetenv-all",
})  # fmt: skip
_PLAIN_LETTERS = frozenset("diPqt")
_ENV = ("env", "e")


def variables_in(words: Sequence[str]) -> Iterator[str]:
    """The names of the variables that the options before the image set or remove (`--env X`)."""
    for option, value in _options(words):
        if option in _ENV:
            yield value.partition("=")[0]


def environment_words(environment: Mapping[str, str]) -> list[str]:
    """The options that set it."""
    return [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]


def mount_words(path: str) -> list[str]:
    """The options that show a directory at its own path, whatever characters that has."""
    fields = [_field(f"{end}={path}") for end in ("source", "target")]
    return ["--mount", ",".join(["type=bind", *fields])]


def overridden(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Which of the variables would not be what we say, for the options that come after ours count."""
    return sorted(set(names).intersection(variables_in(words)))


def _field(text: str) -> str:
    """A field as encoding/csv reads it."""
    return '"{}"'.format(text.replace('"', '""')) if any(char in text for char in ',"\r\n') else text


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option with its value, which is empty for one that has none."""
    left = iter(words)
    for word in left:
        if word == "--" or len(word) < 2 or not word.startswith("-"):
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name, value if equals or name in _PLAIN else next(left, "")
            continue
        for place, letter in enumerate(word[1:], start=2):
            rest = word[place:]
            if rest.startswith("="):
                yield letter, rest[1:]
                break
            if letter not in _PLAIN_LETTERS:
                yield letter, rest or next(left, "")
                break
