"""Lines `key = value`: the format that Cloudpods' programs also accept for host.conf, if it is not YAML."""

from __future__ import annotations

from yunion_mps.config.document import MappingNode, Node, ScalarNode, mark_of_line

_STRING = "tag:yaml.org,2002:str"


def read_assignments(text: bytes) -> Node | None:
    """Return the keys and values as a mapping; None if a line is something else, or if there is none.

    Comments begin with `#`, even in quotes, and lines that begin with `[` are ignored. All values are
    strings, in quotes or not (Cloudpods' structarg, `ParseTornadoFile`).
    """
    try:
        lines = text.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        return None
    pairs = []
    for number, line in enumerate(lines):
        content = line.partition("#")[0].strip()
        if not content or content.startswith("["):
            continue
        key, equals, value = content.partition("=")
        if not key or not equals:
            return None
        pairs.append((_string(number, key.strip()), _string(number, _unquoted(value.strip()))))
    if not pairs:
        return None
    return MappingNode("tag:yaml.org,2002:map", pairs, pairs[0][0].start_mark)


def _unquoted(value: str) -> str:
    is_quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if is_quoted else value


def _string(line: int, value: str) -> Node:
    return ScalarNode(_STRING, value, mark_of_line(line), style='"')
