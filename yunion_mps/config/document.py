"""A YAML file as a tree of values with line numbers, with bounds on size, depth and aliases."""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import yaml

from yunion_mps.core.errors import Problem
from yunion_mps.core.settings import Mistake

#: A configuration is a page of text; the bounds only limit the cost of a mistake or an attack.
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 64
#: Counted with every alias expanded: we expand none, but walking the tree visits each of them.
MAX_VALUES = 200_000
#: YAML 1.1 has sexagesimal numbers (1:30), whose conversion takes quadratic time.
_MAX_NUMBER = 64

#: The C parser if PyYAML was built with it (8 times as fast), otherwise the one in Python.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: Directory in which the packages install examples of configuration files.
_EXAMPLES = "/usr/share/yunion-mps"

_construct = yaml.constructor.SafeConstructor()

#: PyYAML's classes, for the other modules that read the tree.
Node = yaml.nodes.Node
MappingNode = yaml.nodes.MappingNode
ScalarNode = yaml.nodes.ScalarNode
SequenceNode = yaml.nodes.SequenceNode

#: The tag of a plain `<<` as a key (https://yaml.org/type/merge.html).
_MERGE = "tag:yaml.org,2002:merge"

#: What looks like a space, or like nothing, but is no space to YAML; and the colon of Chinese keyboards.
_LOOK_ALIKES = "\u00a0\u1680\u2000-\u200b\u202f\u205f\u2060\u3000\ufeff\uff1a"
_LOOK_ALIKE = rf"[\t{_LOOK_ALIKES}]"
_INDENTATION = rf" *(?:- *)*(?P<odd>{_LOOK_ALIKE})[\s{_LOOK_ALIKES}]*[^\s#]"
_SEPARATOR = rf"[^#]*(?:(?::|^ *-)(?P<odd>[{_LOOK_ALIKES}])|(?P<colon>\uff1a))"
#: Tabs behind something else in their line: valid, but not for PyYAML's own parser.
_TABS = rb"(?<=[^\s])[ \t]*\t[ \t]*"


class FileProblemError(Exception):
    """The file as a whole cannot be used, because of this problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Pair(NamedTuple):
    """A key of a mapping with its value."""

    #: The key's text; empty for keys that are not scalars.
    name: str
    key: Node
    value: Node
    #: The pair is from the value of a merge key (<<), so that the mapping's own keys override it.
    is_merged: bool = False


def read_document(
    path: str, example: str, keys: Iterable[str] = (), other: Callable[[bytes], Node | None] | None = None
) -> Node | None:
    """Return the root of the YAML file `path`, None if it is empty or null.

    Only the first document of the file is read, as by Cloudpods.

    example: the name of the packages' example of the file.
    keys: the keys that are a problem in another document of the file.
    other: reads another format, and returns None for what is not in it; it is tried if the file is not a
    mapping in YAML.

    Raises FileProblemError if the file cannot be read, is no valid YAML, or exceeds the bounds.
    """
    text = _read(path, example)
    try:
        root = _parse(path, text, frozenset(keys))
    except FileProblemError:
        mapping = other(text) if other else None
        if mapping is None:
            raise
        return mapping
    if root is not None and not isinstance(root, MappingNode) and other:
        return other(text) or root
    return root


def _parse(path: str, text: bytes, keys: frozenset[str]) -> Node | None:
    if _Loader is yaml.SafeLoader and not text.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = re.sub(_TABS, lambda tabs: b" " * len(tabs[0]), text)
    root = _compose(path, text, keys)
    if root is None or root.tag.endswith(":null"):
        return None
    if isinstance(root, ScalarNode):
        _check_look_alikes(path, text)
    return root


def _compose(path: str, text: bytes, keys: frozenset[str]) -> Node | None:
    """Return the root of the first document; raises FileProblemError if the text is not valid YAML."""
    try:
        _check_bounds(path, text)
        roots = yaml.compose_all(text, Loader=_Loader)
        root = next(roots, None)
        for another in roots:
            _check_other_document(path, another, keys)
    except yaml.MarkedYAMLError as error:
        raise _syntax_problem(path, text, error) from None
    except yaml.reader.ReaderError as error:
        line = text.count(b"\n", 0, error.position) + 1
        raise _problem(path, line, f"not valid YAML ({error.reason})", "save it as UTF-8 text") from None
    except UnicodeDecodeError:  # PyYAML does not catch it in a tag with escapes, and knows no line
        message = "not valid YAML (a tag is not UTF-8)"
        raise _problem(path, None, message, "write the values without tags") from None
    return root


def _syntax_problem(path: str, text: bytes, error: Any) -> FileProblemError:
    """Return the problem of a syntax error, or of a character near it that is not what it looks like."""
    lines = _lines_of(text)
    for place in (error.problem_mark, error.context_mark):
        if place is None:
            continue
        for number in (place.line, place.line - 1):
            mistake = _look_alike_in_line(lines[number]) if 0 <= number < len(lines) else None
            if mistake:
                return _problem(path, number + 1, mistake.what, mistake.hint)
    mark = error.problem_mark or error.context_mark
    if mark and mark.line >= len(lines):  # noticed only at the end of the file: the beginning says more
        mark = error.context_mark or mark
    line = min(mark.line + 1, len(lines)) if mark else None
    message = " ".join(filter(None, (error.context, error.problem)))
    return _problem(path, line, f"not valid YAML ({message})", "correct the syntax near this line")


def _lines_of(text: bytes) -> list[str]:
    return text.decode("utf-8-sig", errors="replace").splitlines()


def _check_look_alikes(path: str, text: bytes) -> None:
    """Refuse the first line with a character that only looks like indentation or a separator."""
    for number, line in enumerate(_lines_of(text), start=1):
        mistake = _look_alike_in_line(line)
        if mistake:
            raise _problem(path, number, mistake.what, mistake.hint)


def _check_other_document(path: str, root: Node, keys: frozenset[str]) -> None:
    """Refuse one of `keys` in a document that is not read."""
    if not isinstance(root, MappingNode):
        return
    for pair in pairs_of(root):
        if pair.name in keys:
            text = f"{pair.name} is in another document of the file, which is not read"
            raise _problem(path, line_of(pair.key), text, "remove the line --- above it")


def look_alike(text: str) -> str:
    """Return the first character that looks like a space but is none, such as `a no-break space (U+00A0)`.

    Empty if there is none.
    """
    match = re.search(_LOOK_ALIKE, text)
    return _character_name(match[0]) if match else ""


def without_look_alikes(text: str) -> str:
    return re.sub(_LOOK_ALIKE, "", text)


def _character_name(character: str) -> str:
    if character == "\t":
        return "a tab"
    name = unicodedata.name(character).lower()
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name} (U+{ord(character):04X})"


def _look_alike_in_line(line: str) -> Mistake | None:
    """Return what is wrong if a character only looks like indentation or a separator."""
    match = re.match(_INDENTATION, line)
    if match:
        return Mistake(f"the line is indented with {_character_name(match['odd'])}", "indent it with spaces")
    match = re.match(_SEPARATOR, line)
    if match and match["colon"]:
        text = f"the line contains {_character_name(match['colon'])}"
        return Mistake(text, "replace it with a colon and a space")
    if match:
        return Mistake(f"the line contains {_character_name(match['odd'])}", "replace it with a space")
    return None


def mark_of_line(line: int) -> Any:
    """Return the beginning of a line, from 0, as the mark of a node."""
    return yaml.Mark(name="", index=0, line=line, column=0, buffer=None, pointer=0)


def line_of(node: Node) -> int:
    """Return the line of `node` in its file, from 1."""
    line: int = node.start_mark.line
    return line + 1


def value_of(node: Node) -> Any:
    """Return the value of a scalar `node` by the rules of YAML 1.1, None for null; or else the node."""
    kind = node.tag.rpartition(":")[2]
    if not isinstance(node, ScalarNode) or kind not in ("int", "bool", "float", "null", "str"):
        return node
    if kind != "str" and len(node.value) > _MAX_NUMBER:
        return node.value
    if kind in ("int", "float") and ":" in node.value:
        return node.value  # YAML 1.1's sexagesimal numbers are strings for Cloudpods, as in YAML 1.2
    try:
        return getattr(_construct, f"construct_yaml_{kind}")(node)
    except (ValueError, LookupError):  # an explicit tag that the text does not match, as in `!!int ""`
        return node.value


def pairs_of(node: Node) -> list[Pair]:
    """Return the pairs of a mapping in the order of the file, with those of its merge keys in their place.

    A merge key whose value is neither a mapping nor a list of mappings is returned as it is.
    """
    pairs: list[Pair] = []
    for key, value in node.value:
        if key.tag != _MERGE:
            pairs.append(Pair(key.value if isinstance(key, ScalarNode) else "", key, value))
            continue
        merged = value.value[::-1] if isinstance(value, SequenceNode) else [value]  # the first one counts
        if not all(isinstance(mapping, MappingNode) for mapping in merged):
            pairs.append(Pair("<<", key, value))
            continue
        for mapping in merged:
            for pair in pairs_of(mapping):
                pairs.append(pair._replace(is_merged=True))
    return pairs


def is_invalid_merge(pair: Pair) -> bool:
    """Return whether the pair is a merge key that merges nothing."""
    return bool(pair.key.tag == _MERGE)


def is_same(node: Node, other: Node) -> bool:
    """Return whether both nodes have the same value."""
    if node is other:
        return True
    if isinstance(node, ScalarNode) or isinstance(other, ScalarNode):
        if not (isinstance(node, ScalarNode) and isinstance(other, ScalarNode)):
            return False
        if node.tag.endswith(":null") or other.tag.endswith(":null"):
            return bool(node.tag == other.tag)
        return node.value == other.value or (value_of(node) == value_of(other) and node.tag == other.tag)
    if type(node) is not type(other) or len(node.value) != len(other.value):
        return False
    if isinstance(node, SequenceNode):
        return all(is_same(item, other_item) for item, other_item in zip(node.value, other.value))
    for (key, value), (other_key, other_value) in zip(node.value, other.value):
        if not (is_same(key, other_key) and is_same(value, other_value)):
            return False
    return True


def quote(node: Node) -> str:
    """Quote `node` as written in the file, short enough for a message."""
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list" if node.value else "an empty list"
    if node.tag.endswith(":null"):
        return "empty (null)"
    text = node.value if len(node.value) <= 40 else node.value[:39] + "…"
    return f'"{text}"' if node.tag.endswith(":str") else str(text)


def nearest_key(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` abbreviates or misspells, None if there is none.

    An abbreviation is the first 60 % or more of the name (`cuda_mps_pipe_dir`).
    """
    for name in names:
        if name.startswith(word) and 0.6 * len(name) <= len(word) < len(name):
            return name
    return nearest(word, names)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name of which `word` is most likely a misspelling, None if there is none.

    It is cheap for all the foreign keys of host.conf: they are only compared with names of nearly the same
    letters and length.
    """
    by_lower = {name.lower(): name for name in names if _is_similar(name, word)}
    for lower, name in by_lower.items():
        if sorted(lower) == sorted(word.lower()):  # `paht`, too distant by the measure below
            return name
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(by_lower), n=1, cutoff=0.85)
    return by_lower[close[0]] if close else None


def _is_similar(name: str, word: str) -> bool:
    """Return whether the two differ in few letters and in length by few."""
    different_letters = set(name.lower()) ^ set(word.lower())
    return abs(len(name) - len(word)) <= 3 and len(different_letters) <= 4


def _problem(path: str, line: int | None, message: str, hint: str) -> FileProblemError:
    return FileProblemError(Problem(path, line, message, hint))


def _read(path: str, example: str) -> bytes:
    """Read the file, opened without blocking, so that a FIFO in its place cannot hang us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        hint = "make it readable: chmod 0644, and its directory 0755"
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            hint = f"copy the example: cp {_EXAMPLES}/{example} {path}"
        raise _problem(path, None, f"cannot be read ({error.strerror})", hint) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _problem(path, None, "is not a regular file", "put a YAML file there")
    text = b""  # in small pieces, which can be allocated even in a shortage
    with open(descriptor, "rb", buffering=0) as file:
        while len(text) <= MAX_FILE_BYTES and (piece := file.read(1 << 13)):
            text += piece
    if len(text) > MAX_FILE_BYTES:
        raise _problem(
            path, None, "is larger than 1 MiB", "check that the path names a yunion-mps configuration file"
        )
    return text


def _check_bounds(path: str, text: bytes) -> None:
    """Refuse files that take too long to walk: deep nesting, and aliases that multiply ("bombs")."""
    values = 0
    sizes: dict[str | None, int] = {}  # values of each complete anchor
    enclosing: list[tuple[str | None, int]] = []  # enclosing collections: anchor, and values before
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in enclosing):
                message = f"contains the alias *{event.anchor}, which refers to itself"
                raise _problem(path, line, message, "write the values out")
            values += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            enclosing.append((event.anchor, values))
            values += 1
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = enclosing.pop()
            sizes[anchor] = values - before
        if len(enclosing) > MAX_DEPTH:
            message = f"is nested more than {MAX_DEPTH} levels deep"
            raise _problem(path, line, message, "flatten it, as in the example")
        if values > MAX_VALUES:
            message = f"contains more than {MAX_VALUES:,} values once its aliases are expanded"
            raise _problem(path, line, message, "write a short file, without aliases")
