"""Write the sources of a private apt: this machine's own archives with the component non-free.

Usage: nonfree_sources.py CODENAME APT_FOLDER TARGET_FOLDER

Reads sources.list and sources.list.d/*.{list,sources} of APT_FOLDER (/etc/apt), in both of the formats of
sources.list(5), and writes files of the same names to TARGET_FOLDER. A source is Debian's if it has the
component main and a suite of this release; all others are omitted, and so are discs and disabled sources.
"""

from __future__ import annotations

import glob
import os
import re
import sys

SUITES = r"({codename}|oldstable|stable|testing|unstable|sid)(-updates|-security)?"
ONE_LINE = re.compile(r"\s*deb\s+(\[[^\]]*\]\s+)?(?!cdrom:)(\S+)\s+(\S+)\s+([^#]+)")
FIELD = re.compile(r"^([^\s:#]+):(.*(?:\n[ \t].*)*)", re.MULTILINE)
DISABLED = {"no", "false", "without", "off", "disable", "0"}


def from_list(text: str, suites: re.Pattern[str]) -> str:
    """Return the Debian sources among lines like `deb [options] URI SUITE COMPONENT…`."""
    sources = [found.groups(default="") for found in map(ONE_LINE.match, text.splitlines()) if found]
    return "".join(
        f"deb {options}{uri} {suite} non-free\n"
        for options, uri, suite, components in sources
        if suites.fullmatch(suite) and "main" in components.split()
    )


def from_deb822(text: str, suites: re.Pattern[str]) -> str:
    """Return the Debian sources among paragraphs of `Field: value`."""
    without_comments = re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)
    paragraphs = []
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", without_comments):
        fields = {name.lower(): value for name, value in FIELD.findall(paragraph)}
        words = {name: value.lower().split() for name, value in fields.items()}
        ours = " ".join(filter(suites.fullmatch, words.get("suites", [])))
        enabled = DISABLED.isdisjoint(words.get("enabled", []))
        if ours and enabled and "deb" in words.get("types", []) and "main" in words.get("components", []):
            fields.update(types=" deb", suites=f" {ours}", components=" non-free")
            paragraphs.append("".join(f"{name}:{value}\n" for name, value in fields.items()))
    return "\n".join(paragraphs)


def main(codename: str, apt: str, target: str) -> int:
    """Return 0, or 1 if the machine has no Debian source."""
    suites = re.compile(SUITES.format(codename=re.escape(codename)))
    os.makedirs(f"{target}/sources.list.d")
    any_found = False
    for path in [f"{apt}/sources.list", *glob.glob(f"{apt}/sources.list.d/*")]:
        convert = {".list": from_list, ".sources": from_deb822}.get(os.path.splitext(path)[1])
        if convert and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                sources = convert(file.read(), suites)
            with open(target + path[len(apt) :], "w", encoding="utf-8") as file:
                file.write(sources)
            any_found = any_found or bool(sources)
    return 0 if any_found else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
