"""Record what scripts/demo prints in docs/demo.txt, and in the sessions of README.md; see scripts/sessions.

A session is a fenced `console` block of commands (`$ ...`) that the demo runs, each with its output;
`…` as the last line of an output stands for the rest.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TRANSCRIPT = CHECKOUT / "docs/demo.txt"
README = CHECKOUT / "README.md"
#: The root of a simulated host, which is removed.
_ROOT = re.compile(r"/(?:dev/shm|tmp)/sim\.\w{8}(?=/)")
_PID = r"\b41\d{3}\b"  # because scripts/sessions sets the last PID to 41000
#: What differs in each run, and what is recorded instead.
_ALIKE = {
    r"\b[0-9a-f]{8}\b(?![-:])": "6c9d432c",  # leases
    r"\b\d+s\b": "1s",
    r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ": "2026-11-20T13:45:00Z",
    r"\b\d+ ms\b": "1 ms",
    r"\b\d+ of \d+ MiB free": "24092 of 24105 MiB free",
}
#: What differs between machines and is not compared.
_VARIES = (
    r"\b\d+\.\d+\.\d+\b\S*",  # versions
    r"[ -]+",  # and the column widths that depend on them
)


def recorded() -> str:
    """Run the demo; returns its output with fixed PIDs, leases and times."""
    done = subprocess.run(
        [CHECKOUT / "scripts/demo"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        sys.exit(f"sessions: scripts/demo failed:\n{done.stdout}{done.stderr}")
    pids: dict[str, str] = {}
    text = _ROOT.sub("", done.stdout)
    text = re.sub(_PID, lambda one: pids.setdefault(one[0], str(41001 + len(pids))), text)
    for pattern, instead in _ALIKE.items():
        text = re.sub(pattern, instead, text)
    return text


def comparable(text: str) -> list[str]:
    """Return the lines without what varies between machines."""
    return re.sub("|".join(_VARIES), " ", text).splitlines()


def outputs(transcript: str) -> dict[str, list[str]]:
    """Return the output of each command, by the command."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^(?=\$ )", transcript, flags=re.MULTILINE)[1:]:
        command, *lines = re.split(r"^(?:==>|====)", part, flags=re.MULTILINE)[0].strip().splitlines()
        found[command] = lines
    return found


def with_sessions(page: str, transcript: str) -> str:
    """Return the page with its sessions taken from the transcript."""
    known = outputs(transcript)

    def session(block: re.Match[str]) -> str:
        lines = []
        for part in re.split(r"^(?=\$ )", block[1], flags=re.MULTILINE)[1:]:
            command, *before = part.strip().splitlines()
            output = known[command]
            if before[-1:] == ["…"]:
                output = [*output[: len(before) - 1], "…"]
            lines += [command, *output, ""]
        return "```console\n" + "\n".join(lines[:-1]) + "\n```"

    return re.sub(r"```console\n(.*?)```", session, page, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Write both files, or compare them; 1 if they differ."""
    transcript = recorded()
    expected = {TRANSCRIPT: transcript, README: with_sessions(README.read_text(), transcript)}
    if arguments != ["--check"]:
        for path, text in expected.items():
            path.write_text(text)
        return 0
    differences = [
        line
        for path, text in expected.items()
        for line in difflib.unified_diff(
            comparable(path.read_text()), comparable(text), path.name, "scripts/demo", lineterm=""
        )
    ]
    if differences:
        print(
            "\n".join(differences),
            "\nsessions: the recorded output is outdated; record it again: scripts/sessions",
            sep="",
            file=sys.stderr,
        )
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
