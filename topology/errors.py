"""The one error of this package. Whoever shows it to a user decides the exit code."""

from __future__ import annotations

__all__ = ["TopologyError"]


class TopologyError(Exception):
    """A cluster description that cannot be used, or a kernel that is not what was asked of it.

    ``text`` is one line: the file and key, or the node, link and field, what was expected and what was got.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
