"""One word for one concept: the names that concepts no longer have stay out of code, tests and texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PLACES = (
    "yunion_mps",
    "tests",
    "docs",
    "scripts",
    "packaging",
    "systemd",
    "etc",
    "requirements",
    "*.md",
    "*.toml",
)
_VERBS = "is|are|was|has|have|had|would|could|can|cannot"
#: What is not said any more, and what is said. An underscore counts as a space.
WORDS = {
    r"\banew\b": "again",
    r"\bwhoever\b": "a named subject, such as the caller",
    r"\bwish(es)?\b": "request",
    r"\bbereave": "orphaned server",
    r"\bbur(y|ied|ies)\b": "reap",
    r"\bforgiv": "recover",
    r"\bgiver\b": "LeaseService",
    r"\bclass (Told|People|Later|Left|Woken|Ends|Doors|Places|Book)\b": "a noun for what it is",
    r"\bput(s|ting)? back\b": "restore",
    r"\bin(to)? force\b": "in effect",
    r"\b(goes|go|gone) without\b": "is left out",
    r"\bis no key\b": "unknown key",
    rf", for (it|they|he|this|that|we|there) ({_VERBS})\b": "because",
    r"\bexamination\b": "preflight",
    r"\bsuccession\b": "rollover",
    r"\bill(ness)?\b": "lost, degraded, at fault",
    r"\b(ta(ke|kes|ken|king)|took) over\b|\btakeover\b": "adopt",
    r"\bevents? journal\b": "event log, because the journal is systemd's",
    r"\bwanted\b": "desired, requested, target or expected",
    r"\bsomebody\b": "a named subject",
    rf"\bnobody('s)? (else|ever|here|knows|asks|waits|calls|needs|may|will|{_VERBS})\b": "no caller, no job",
    r"\bdoors?\b": "listener",
    r"\bremed(y|ies)\b": "hint",
}


def _texts() -> Iterator[tuple[str, str]]:
    """The name and the text of each file, without what is generated and what is no text."""
    for place in PLACES:
        for top in CHECKOUT.glob(place):
            for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
                if not path.is_file() or path == Path(__file__) or path.suffix in (".lock", ".pyc"):
                    continue
                data = path.read_bytes()
                if b"\0" not in data:
                    yield str(path.relative_to(CHECKOUT)), data.decode("utf-8", "replace")


def test_the_old_vocabulary_is_not_used() -> None:
    words = {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in WORDS.items()}
    found = [
        f"{name}:{number}: {match[0]!r}: say {instead}"
        for name, text in _texts()
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, instead in words.items()
        for match in pattern.finditer(line.replace("_", " "))
    ]
    assert found == []


def test_the_old_vocabulary_is_found() -> None:
    """As the patterns are meant: `taken_over` is found, and words that only contain one are not."""
    pattern = re.compile("|".join(WORDS), re.IGNORECASE)
    said = "it was taken over; the limits in force; begun anew, for it is lost; class People(NamedTuple)"
    assert len(pattern.findall(said)) == 5
    assert not pattern.search("people, still, until, told to end, journalctl, a hint for it")
