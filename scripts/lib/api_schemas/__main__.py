"""`scripts/schemas`: write the schemas to a file, by default the package's, and docs/reason-codes.md."""

from __future__ import annotations

import sys
from pathlib import Path

from yunion_mps.core.reasons import CODES, hint_of

from api_schemas.making import FILE, content

_PAGE = Path(__file__).resolve().parents[3] / "docs/reason-codes.md"
_HEAD = """# Reason codes

Every problem has a stable code next to its text, so that no program has to parse messages: `reason_code`
of a device, GPU or domain, `code` of a problem, event or finding, the label `reason` of
metrics. A code is never renamed or reused. `GPU` stands for the GPU's UUID.

| code | meaning | hint |
|---|---|---|
"""


def reason_page() -> str:
    """The table of all codes."""
    rows = ((code, one.meaning, hint_of(code, lease="LEASE")) for code, one in CODES.items())
    return _HEAD + "".join(f"| `{code}` | {meaning} | {_cell(hint)} |\n" for code, meaning, hint in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(content())
    else:
        FILE.write_text(content())
        _PAGE.write_text(reason_page())
