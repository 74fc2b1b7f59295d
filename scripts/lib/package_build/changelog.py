"""The packages' changelogs, out of the first section of CHANGELOG.md: what is new in this version."""

from __future__ import annotations

import textwrap
import time
from email.utils import formatdate

from package_build.source import Source

#: There is no public mailbox: those who publish packages answer for them.
MAINTAINER = "yunion-mps maintainers <yunion-mps@localhost>"
#: Cloudpods' package of the same name counts its versions as Cloudpods does (3.11): this makes ours newer.
EPOCH = 1


def points(source: Source) -> list[str]:
    """The points of the newest section, each one paragraph."""
    section = source.read("CHANGELOG.md").split("\n## ")[1]
    return [" ".join(point.split()) for point in section.split("\n- ")[1:]]


def debian_changelog(source: Source) -> str:
    """As deb-changelog(5) has it."""
    head = f"yunion-mps-daemon ({EPOCH}:{source.version}) unstable; urgency=medium\n\n"
    body = "".join(_indented(point, "  * ", "    ") for point in points(source))
    return f"{head}{body}\n -- {MAINTAINER}  {formatdate(source.epoch_s)}\n"


def rpm_changelog(source: Source) -> str:
    """As a spec's %changelog has it."""
    day = time.strftime("%a %b %d %Y", time.gmtime(source.epoch_s))
    body = "".join(_indented(point, "- ", "  ") for point in points(source)).replace("%", "%%")
    return f"* {day} {MAINTAINER} - {EPOCH}:{source.version}-1\n{body}"


def _indented(point: str, first: str, rest: str) -> str:
    return textwrap.fill(point, 78, initial_indent=first, subsequent_indent=rest) + "\n"
