"""The list of generated files, and writing them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import datetime, timezone

from yunion_mps.cli.root import completion
from yunion_mps.config import DEVICE_FILE_KEYS, KEYS
from yunion_mps.core.enums import ENTRY_TYPES

from manual.keys import device_file_example, host_conf_example
from manual.pages import (
    command_page,
    daemon_page,
    device_file_page,
    host_conf_page,
    kubelet_plugin_page,
)

#: Where each shell looks for a file of this name once it is in its directory.
_COMPLETIONS = {"bash": "yunion-mps.bash", "zsh": "_yunion-mps", "fish": "yunion-mps.fish"}


def main(directory: str, epoch: str) -> int:
    """Write all files below `directory`; the man pages are dated by `epoch` (s since 1970, UTC)."""
    try:
        date = datetime.fromtimestamp(int(epoch), timezone.utc).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        print(f"generate: SOURCE_DATE_EPOCH is {epoch!r}: write seconds since 1970", file=sys.stderr)
        return 2
    try:
        for name, text in files(date):
            path = os.path.join(directory, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        print(f"generate: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def files(date: str) -> Iterator[tuple[str, str]]:
    """Return the path of each file below the directory, and its text."""
    yield "man/yunion-mps.1", command_page(date)
    yield "man/yunion-mps-daemon.8", daemon_page(date)
    yield "man/yunion-mps-kubelet-plugin.8", kubelet_plugin_page(date)
    yield "man/yunion-mps-host.conf.5", host_conf_page(date)
    yield "man/yunion-mps-host_container_device.yml.5", device_file_page(date)
    for shell, name in _COMPLETIONS.items():
        yield f"completions/{name}", completion_script(shell)
    yield "etc/yunion/host.conf", host_conf_example()
    yield "etc/yunion/host_container_device.yml", device_file_example()
    yield "scriptlets/keys.sh", names_for_purge()


def names_for_purge() -> str:
    """Return the shell variables by which a purge recognizes what is ours in the configuration files."""
    text = "# What is ours in the configuration files. Written by scripts/generate; copied from its output.\n"
    for name, words in (
        ("our_keys", KEYS),
        ("our_entry_keys", DEVICE_FILE_KEYS),
        ("our_types", ENTRY_TYPES.values()),
    ):
        lines = "\n".join(words)
        text += f"\n{name}='{lines}'\n"
    return text


def completion_script(shell: str) -> str:
    """Return the output of `yunion-mps completion`."""
    assert completion.callback
    with redirect_stdout(io.StringIO()) as printed:
        completion.callback(shell)
    return printed.getvalue()
