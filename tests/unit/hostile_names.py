"""Names as a hostile user chooses them, for tests of what reads them and of what shows them."""

from __future__ import annotations

from hypothesis import strategies as st

#: What steers a terminal, ends a line, or turns the direction of writing.
STEERING = "\t\n\r\v\f\x1b\x1c\x7f\x85\x9b\x9d\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff\ud800"
HARMLESS = "aZ0 -=;,:\"'`$%\\{}<>|é日Ω😀"

HOSTILE = st.text(st.sampled_from(STEERING + HARMLESS), min_size=1, max_size=40)
#: All of it at once, with what systemd, the journal and a terminal obey.
WORST = f"job\nSTOPPING=1\n<2>forged{STEERING}\x1b]0;x\x07\x1b[2J"
#: How none of it may come out.
STEERS = frozenset(STEERING) | {"\x07"}

READABLE = ["python train.py", "jürgen", "訓練.py", "Ω-опыт", "C:\\new", "$HOME `x` 'y' \"z\"", "😀"]


def steers(text: str) -> set[str]:
    """What in the text could do harm, where each of its lines was meant to be one."""
    return {char for char in text if char != "\n" and (char in STEERS or not char.isprintable())}
