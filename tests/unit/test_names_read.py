"""Names that others choose are escaped where they are read, and those that are readable stay as they are."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from yunion_mps.core.models import DomainPlan, PlannedGpu
from yunion_mps.host.proc import command_of, process_name, user_name
from yunion_mps.mps.log_file import log_hint

from integration.daemon_host import eventually
from unit.containers.test_lookup import ID, process, write
from unit.containers.test_lookup import name_of as container_named
from unit.hostile_names import HOSTILE, READABLE, STEERING

#: A file's name, which becomes a process' name, has no slash, and the kernel keeps 15 bytes of it.
FILE_NAMES = HOSTILE.map(lambda text: text.replace("\ud800", "")[:5]).filter(lambda text: text.strip(". \n"))


@contextlib.contextmanager
def running(name: str, command: str) -> Iterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(os.fsencode(folder), name.encode())
        os.symlink("/bin/sleep", path)
        pid = os.posix_spawn(path, [command.encode(errors="surrogatepass"), b"1000"], {})
        try:
            eventually(lambda: bool(command_of(pid)))  # the kernel shows none until the program is there
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@settings(max_examples=30)
@given(FILE_NAMES, HOSTILE)
def test_a_process_has_its_name_and_its_command_on_one_line(name: str, command: str) -> None:
    with running(name, command) as pid:
        assert process_name(pid)
        assert process_name(pid).isprintable()
        assert command_of(pid).isprintable()


@pytest.mark.parametrize("name", READABLE)
def test_a_readable_command_is_shown_as_it_is(name: str) -> None:
    with running("a", name) as pid:
        assert command_of(pid) == (f"'{name}' 1000" if " " in name else f"{name} 1000")


def test_control_characters_are_escaped() -> None:
    with running("\nREADY=1\n", "a\n<2>b\x1b[2J\x9b\u202e") as pid:
        assert process_name(pid) == "\\nREADY=1\\n"
        assert command_of(pid) == "a\\n<2>b\\x1b[2J\\x9b\\u202e 1000"


@given(HOSTILE)
def test_a_user_is_named_on_one_line(name: str) -> None:
    """As a directory service far away has it."""
    entry = pwd.struct_passwd((name, "x", 4711, 4711, "", "/", "/bin/sh"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pwd, "getpwuid", lambda uid: entry)
        assert user_name(4711).isprintable()


@given(HOSTILE)
def test_a_container_is_named_on_one_line(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pid = process(Path(folder), f"0::/machine.slice/libpod-{ID}.scope/container")
        place = "var/lib/containers/storage/overlay-containers/containers.json"
        write(Path(folder), place, [{"id": ID, "names": [name]}])
        assert container_named(Path(folder), pid).isprintable()


def test_the_control_daemon_s_log_is_quoted_without_what_steers(tmp_path: Path) -> None:
    plan = DomainPlan("host", "/pipe", str(tmp_path), (PlannedGpu("GPU-1", 5760),), 25.0)
    lines = [f"a{char}b" for char in STEERING if char not in "\n\r\ud800"][-5:]
    (tmp_path / "control.log").write_text("\n".join(lines), encoding="utf-8")
    begin, *quoted = log_hint(plan).split("\n")
    assert begin == f"see its log: {tmp_path}/control.log"
    assert len(quoted) == len(lines)
    assert all(map(str.isprintable, quoted))
