"""A YAML file as a tree of values with line numbers, with bounds on size, depth and aliases."""

from __future__ import annotations

import errno
import importlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from yunion_mps.errors import Problem

_compile = re.compile


class _LazyPattern:
    """A regular expression that is compiled when it is first used."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(_compile(*self._arguments), name)


def _import_yaml() -> Any:
    """Import PyYAML without compiling its regular expressions: 4 of 9 ms, most for one that is never used."""
    re.compile = _LazyPattern  # type: ignore[assignment]
    try:
        return importlib.import_module("yaml")
    finally:
        re.compile = _compile


if TYPE_CHECKING:
    import yaml
else:
    yaml = _import_yaml()

#: A configuration is a page of text; the bounds only limit the cost of a mistake or an attack.
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 64
#: Counted with every alias expanded: we expand none, but walking the tree visits each of them.
MAX_VALUES = 200_000
#: YAML 1.1 has sexagesimal numbers (1:30), whose conversion takes quadratic time.
_MAX_NUMBER = 64

#: YAML 1.1's words for values, in three spellings each.
_WORDS = {
    spelled: f"tag:yaml.org,2002:{kind}"
    for kind, words in (("bool", "yes no true false on off"), ("null", "null"))
    for word in words.split()
    for spelled in (word, word.capitalize(), word.upper())
}

#: The C parser if PyYAML was built with it (8 times as fast), otherwise the one in Python.
_ParserOfYaml: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_ParserOfYaml):  # type: ignore[misc]
    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """As PyYAML does, but names, words and numbers without its regular expressions: 3 ms of a start."""
        if kind is yaml.ScalarNode and implicit[0] and value.isascii():
            if value.isidentifier():
                return _WORDS.get(value, "tag:yaml.org,2002:str")
            if value.isdigit() and value[0] != "0":
                return "tag:yaml.org,2002:int"
        return super().resolve(kind, value, implicit)


#: Directory in which the packages install examples of both files.
_EXAMPLES = "/usr/share/yunion-mps"

_construct = yaml.constructor.SafeConstructor()

#: Other modules get these classes here, so that PyYAML is imported only once, and quickly.
Node = yaml.nodes.Node
MappingNode = yaml.nodes.MappingNode
ScalarNode = yaml.nodes.ScalarNode
SequenceNode = yaml.nodes.SequenceNode

NO_MERGE = ("merge keys (<<) are not supported", "write the keys out")


class FileProblemError(Exception):
    """The file as a whole cannot be used, because of this problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_document(path: str, example: str) -> Node | None:
    """Return the root of the YAML file `path`, None if it is empty; raises FileProblemError.

    `example` is the name of the packages' example of the file.
    """
    text = _read(path, example)
    try:
        _check_bounds(path, text)
        root = yaml.compose(text, Loader=_Loader)
        return root if root and not root.tag.endswith(":null") else None
    except yaml.MarkedYAMLError as error:
        mark, last = error.problem_mark or error.context_mark, len(text.splitlines())
        if mark and mark.line >= last:  # noticed only at the end of the file: the beginning says more
            mark = error.context_mark or mark
        line = min(mark.line + 1, last) if mark else None
        what = " ".join(filter(None, (error.context, error.problem)))
        raise _problem(path, line, f"not valid YAML ({what})", "correct the syntax near this line") from None
    except yaml.reader.ReaderError as error:
        line = text.count(b"\n", 0, error.position) + 1
        raise _problem(path, line, f"not valid YAML ({error.reason})", "save it as UTF-8 text") from None
    except UnicodeDecodeError:  # PyYAML does not catch it in a tag with escapes, and knows no line
        what = "not valid YAML (a tag is not UTF-8)"
        raise _problem(path, None, what, "write the values without tags") from None


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
    try:
        return getattr(_construct, f"construct_yaml_{kind}")(node)
    except (ValueError, LookupError):  # an explicit tag that the text does not match, as in `!!int ""`
        return node.value


def pairs_of(node: Node) -> Iterator[tuple[str, Node, Node]]:
    """Yield (key's text, key, value) of a mapping; the text is "" for keys that are not scalars."""
    for key, value in node.value:
        yield (key.value if isinstance(key, ScalarNode) else "", key, value)


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
    """Like `nearest`; also matches names of which `word` is the first 60 % or more (`cuda_mps_pipe_dir`)."""
    completions = (
        name for name in names if name.startswith(word) and 0.6 * len(name) <= len(word) < len(name)
    )
    return next(completions, None) or nearest(word, names)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name of which `word` is most likely a misspelling, if any.

    It is cheap for all the foreign keys of host.conf: `difflib` (5 ms to import) is used only if letters and
    length nearly match.
    """
    candidates = [
        name
        for name in names
        if abs(len(name) - len(word)) <= 3 and len(set(name.lower()) ^ set(word.lower())) <= 4
    ]
    if not candidates:
        return None
    import difflib

    by_lower = {name.lower(): name for name in candidates}
    for lower, name in by_lower.items():
        if sorted(lower) == sorted(word.lower()):  # `paht`, too distant by the measure below
            return name
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(by_lower), n=1, cutoff=0.85)
    return by_lower[close[0]] if close else None


def _problem(path: str, line: int | None, what: str, hint: str) -> FileProblemError:
    return FileProblemError(Problem(path, line, what, hint))


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
                what = f"contains the alias *{event.anchor}, which refers to itself"
                raise _problem(path, line, what, "write the values out")
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
            what = f"is nested more than {MAX_DEPTH} levels deep"
            raise _problem(path, line, what, "flatten it, as in the example")
        if values > MAX_VALUES:
            what = f"contains more than {MAX_VALUES:,} values once its aliases are expanded"
            raise _problem(path, line, what, "write a short file, without aliases")
