from __future__ import annotations

import pickle
import typing

from yunion_mps.tuples import NamedTuple


class Share(NamedTuple):
    """A share of something."""

    name: str
    part: float = 1.0

    @property
    def title(self) -> str:
        return self.name.title()


def test_a_named_tuple_has_what_its_class_declares() -> None:
    share = Share("half", part=0.5)
    assert (share, share.title, Share("all").part) == (("half", 0.5), "Half", 1.0)
    assert (Share._fields, Share._field_defaults) == (("name", "part"), {"part": 1.0})
    assert share._replace(part=0.25)._asdict() == {"name": "half", "part": 0.25}
    assert (repr(share), Share.__doc__) == ("Share(name='half', part=0.5)", "A share of something.")


def test_a_named_tuple_is_found_by_its_module_and_name() -> None:
    assert pickle.loads(pickle.dumps(Share("half"))) == Share("half")
    assert typing.get_type_hints(Share) == {"name": str, "part": float}
