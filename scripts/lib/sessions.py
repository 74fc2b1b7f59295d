"""What scripts/demo prints, in docs/demo.txt, and the sessions in README.md from it: see scripts/sessions.

A session is a fenced block `console` of commands (`$ ...`) that the demo runs, each with what it printed;
`…` as a command's last line stands for the rest.
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
#: The simulated hosts' roots are not worth reading.
_ROOT = re.compile(r"/(?:dev/shm|tmp)/sim\.\w{8}(?=/)")
_PID = r"\b41\d{3}\b"  # by scripts/sessions
#: What is another at each run, and how it is recorded.
_ALIKE = {
    r"\b[0-9a-f]{8}\b(?![-:])": "6c9d432c",  # leases
    r"\b\d+s\b": "1s",
    r"\b\d+ ms\b": "1 ms",
    r"\b\d+ of \d+ MiB free": "24092 of 24105 MiB free",
}
#: What differs between two machines, and is not compared.
_VARIES = (
    r"\b\d+\.\d+\.\d+\b\S*",  # versions
    r"[ -]+",  # and how wide a column is because of them
)


def recorded() -> str:
    """Run the demo; returns what it printed, with PIDs, leases and times that are always the same."""
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
    """The lines without what varies."""
    return re.sub("|".join(_VARIES), " ", text).splitlines()


def outputs(transcript: str) -> dict[str, list[str]]:
    """The lines that each command printed, by its line."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^(?=\$ )", transcript, flags=re.MULTILINE)[1:]:
        command, *lines = re.split(r"^(?:==>|====)", part, flags=re.MULTILINE)[0].strip().splitlines()
        found[command] = lines
    return found


def with_sessions(page: str, transcript: str) -> str:
    """The page with its sessions as the transcript has them."""
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
    wanted = {TRANSCRIPT: transcript, README: with_sessions(README.read_text(), transcript)}
    if arguments != ["--check"]:
        for path, text in wanted.items():
            path.write_text(text)
        return 0
    differences = [
        line
        for path, text in wanted.items()
        for line in difflib.unified_diff(
            comparable(path.read_text()), comparable(text), path.name, "scripts/demo", lineterm=""
        )
    ]
    if differences:
        print(
            "\n".join(differences), "\nsessions: record them again: scripts/sessions", sep="", file=sys.stderr
        )
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
