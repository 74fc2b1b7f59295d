"""Writes the schemas to a file, which is by default that of the package; `scripts/schemas` runs this."""

from __future__ import annotations

import sys
from pathlib import Path

from api_schemas.making import FILE, content

if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(content())
