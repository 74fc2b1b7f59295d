"""The value of an entry's `mig`: a layout, a profile or a list of profiles; GPUs are not consulted here."""

from __future__ import annotations

import re

from yunion_mps.config.document import Node, SequenceNode, value_of
from yunion_mps.config.values import InvalidValueError
from yunion_mps.mig import ALL, BALANCED, DISABLED

#: A profile, perhaps with attributes such as `+me`; in names of layouts, mig-parted writes `.me`.
_PROFILE = r"[1-9]\d*g\.[1-9]\d*gb(?:[+.-][a-z]+(?:\.[a-z]+)*)?"
_LAYOUT = f"{DISABLED}|{BALANCED}|(?:{ALL})?{_PROFILE}"

_EXAMPLE = "for example all-1g.10gb, all-balanced, or a list of profiles such as [3g.40gb, 1g.10gb]"


def layout(key: str, node: Node) -> tuple[str, ...]:
    """Return the name of a layout, or those of profiles, as written."""
    if not isinstance(node, SequenceNode):
        value = value_of(node)
        if not isinstance(value, str) or not re.fullmatch(_LAYOUT, value):
            raise InvalidValueError(key, node, "not a MIG layout", f"write a layout, {_EXAMPLE}")
        return (value,)
    if not node.value:
        raise InvalidValueError(key, node, "not a MIG layout", f"write a layout, {_EXAMPLE}")
    names = []
    for item in node.value:
        value = value_of(item)
        if not isinstance(value, str) or not re.fullmatch(_PROFILE, value):
            hint = "write the profiles of instances, for example [3g.40gb, 1g.10gb, 1g.10gb]"
            raise InvalidValueError(key, item, "not a MIG profile", hint)
        names.append(value)
    return tuple(names)
