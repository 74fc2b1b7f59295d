"""What a with statement closes at its end."""

from __future__ import annotations

from typing import TypeVar

_Self = TypeVar("_Self", bound="Closes")  # typing.Self is not in Python 3.9


class Closes:
    """A context manager that is itself, and ends with `close`."""

    def __enter__(self: _Self) -> _Self:  # noqa: PYI019
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError
