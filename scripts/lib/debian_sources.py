"""Write the sources of a private apt: this machine's own archives with another component or release.

Usage: debian_sources.py CODENAME APT_FOLDER TARGET_FOLDER RELEASE COMPONENT

Reads sources.list and sources.list.d/*.{list,sources} of APT_FOLDER (/etc/apt), in both of the formats of
sources.list(5), and writes files of the same names, with that release and component, to TARGET_FOLDER. A
source is Debian's if it has the component main and a suite of CODENAME, the machine's release; all others are
omitted, and so are discs and disabled sources.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from typing import NamedTuple

SUITE = r"(?:{codename}|oldstable|stable|testing|unstable|sid)(-updates|-security)?"
ONE_LINE = re.compile(r"\s*deb\s+(\[[^\]]*\]\s+)?(?!cdrom:)(\S+)\s+(\S+)\s+([^#]+)")
FIELD = re.compile(r"^([^\s:#]+):(.*(?:\n[ \t].*)*)", re.MULTILINE)
DISABLED = {"no", "false", "without", "off", "disable", "0"}


class Selection(NamedTuple):
    """`suite` matches those of the machine's release."""

    suite: re.Pattern[str]
    release: str
    component: str

    def suite_of(self, suite: str) -> str:
        """The suite of the selected release, empty if this is none of the machine's release."""
        found = self.suite.fullmatch(suite)
        return f"{self.release}{found[1] or ''}" if found else ""


def from_list(text: str, selection: Selection) -> str:
    """Return the Debian sources among lines like `deb [options] URI SUITE COMPONENT…`."""
    sources = [found.groups(default="") for found in map(ONE_LINE.match, text.splitlines()) if found]
    return "".join(
        f"deb {options}{uri} {selection.suite_of(suite)} {selection.component}\n"
        for options, uri, suite, components in sources
        if selection.suite_of(suite) and "main" in components.split()
    )


def from_deb822(text: str, selection: Selection) -> str:
    """Return the Debian sources among paragraphs of `Field: value`."""
    without_comments = re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)
    paragraphs = []
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", without_comments):
        fields = {name.lower(): value for name, value in FIELD.findall(paragraph)}
        words = {name: value.lower().split() for name, value in fields.items()}
        ours = " ".join(filter(None, map(selection.suite_of, words.get("suites", []))))
        enabled = DISABLED.isdisjoint(words.get("enabled", []))
        if ours and enabled and "deb" in words.get("types", []) and "main" in words.get("components", []):
            fields.update(types=" deb", suites=f" {ours}", components=f" {selection.component}")
            paragraphs.append("".join(f"{name}:{value}\n" for name, value in fields.items()))
    return "\n".join(paragraphs)


def main(codename: str, apt: str, target: str, release: str, component: str) -> int:
    """Return 0, or 1 if the machine has no Debian source."""
    selection = Selection(re.compile(SUITE.format(codename=re.escape(codename))), release, component)
    os.makedirs(f"{target}/sources.list.d")
    any_found = False
    for path in [f"{apt}/sources.list", *glob.glob(f"{apt}/sources.list.d/*")]:
        convert = {".list": from_list, ".sources": from_deb822}.get(os.path.splitext(path)[1])
        if convert and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                sources = convert(file.read(), selection)
            if sources:
                with open(target + path[len(apt) :], "w", encoding="utf-8") as file:
                    file.write(sources)
                any_found = True
    return 0 if any_found else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
