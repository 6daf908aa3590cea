"""A request on one node: what it is doing there, and how it is given up.

Giving up is asked for from outside, at any moment, and heeded where it is safe. A role's steps are of three
kinds. One that only waits is cut short (``until_asked``). One that somebody else carries out, such as a prefill on
another node or a place in a batch, is called off by telling them (``telling``), and goes on until they confirm.
One during which bytes move into memory of the request's, or are on their way to storage, is let end (``begin``);
it is bounded by the network. So when ``Withdrawn`` is raised nothing is in flight, and what the request holds can
be given to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from ..errors import Withdrawn

__all__ = ["Withdrawal"]


class Withdrawal:
    """Of one request. ``doing`` completes the sentence "the request is ..."."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.doing = "waiting"
        self.asked = False
        self._waits: dict[trio.CancelScope, None] = {}
        self._tell: Callable[[], None] | None = None

    def ask(self) -> None:
        """Give the request up, as soon as it is safe. Asking again changes nothing."""
        if self.asked:
            return
        self.asked = True
        for scope in self._waits:
            scope.cancel()
        if self._tell is not None:
            self._tell()

    def begin(self, doing: str) -> None:
        """Go on to a step that is let end. Withdrawn, before it begins, where that was asked for."""
        if self.asked:
            raise self.error()
        self.doing = doing

    @contextmanager
    def until_asked(self, doing: str = "") -> Iterator[None]:
        """A step that is cut short, with Withdrawn. Whatever it awaits must take its cancellation well."""
        self.begin(doing or self.doing)
        with trio.CancelScope() as scope:
            self._waits[scope] = None
            try:
                yield
            finally:
                del self._waits[scope]
        if scope.cancelled_caught:
            raise self.error()

    @contextmanager
    def telling(self, tell: Callable[[], None], doing: str) -> Iterator[None]:
        """A step of somebody else's: ``tell`` them when this is asked for, and wait for what they say to it."""
        self.begin(doing)
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def error(self) -> Withdrawn:
        """What to raise."""
        return Withdrawn(f"request {self.request} was given up while {self.doing}")
