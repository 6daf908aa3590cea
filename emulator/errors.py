"""The error types of the emulator: whose fault, which object, what was expected.

Every message is one line that a user can act on. ``code`` crosses processes; ``definite`` says that the
act surely did not happen, so that repeating it is safe. ``exit_code`` is what the command line returns.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EmulatorError",
    "InvariantBroken",
    "PeerLost",
    "PolicyError",
    "ProtocolViolation",
    "Refused",
    "StoreError",
    "Withdrawn",
    "error_from_code",
    "leaf_errors",
    "reported",
]


class EmulatorError(Exception):
    """Base of all errors that the emulator raises on purpose."""

    code = "emulator"
    exit_code = 1

    def __init__(self, text: str, *, definite: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.definite = definite


class ConfigError(EmulatorError):
    """The user's file, key, option or trace line cannot be used; nothing was started."""

    code = "config"
    exit_code = 2


class PeerLost(EmulatorError):
    """The other end of a queue pair or of a call is gone; what was in flight may or may not have landed."""

    code = "peer_lost"


class ProtocolViolation(EmulatorError):
    """A peer sent what the protocol does not allow: a fault of ours, never of the user."""

    code = "protocol"


class StoreError(EmulatorError):
    """The block store could not read or keep a block."""

    code = "store"


class Refused(EmulatorError):
    """Admission refused a request that can never fit."""

    code = "refused"

    def __init__(self, text: str, *, definite: bool = True) -> None:
        super().__init__(text, definite=definite)


class Withdrawn(EmulatorError):
    """A request was given up, and nothing of it is in flight where this was raised."""

    code = "withdrawn"


class PolicyError(EmulatorError):
    """A user's policy raised, answered with what cannot be done, or did not answer; the run cannot go on."""

    code = "policy"


class InvariantBroken(EmulatorError):
    """A finished run breaks an invariant of docs/invariants.md."""

    code = "invariant"
    exit_code = 4


def reported(error: BaseException) -> EmulatorError | None:
    """The one error that explains a nursery's group, or None where any leaf is a defect of ours.

    A lost peer is mostly the echo of what went wrong over there, so another reported error comes first.
    """
    leaves = leaf_errors(error)
    known = [leaf for leaf in leaves if isinstance(leaf, EmulatorError)]
    if not known or len(known) < len(leaves):
        return None
    return next((leaf for leaf in known if not isinstance(leaf, PeerLost)), known[0])


def leaf_errors(error: BaseException) -> list[BaseException]:
    """The errors of a group and of the groups in it; of a single error, itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
    return [error]


_BY_CODE: dict[str, type[EmulatorError]] = {
    cls.code: cls
    for cls in (
        *(EmulatorError, ConfigError, PeerLost, ProtocolViolation, StoreError, Refused),
        *(Withdrawn, PolicyError, InvariantBroken),
    )
}


def error_from_code(code: str, text: str, definite: bool) -> EmulatorError:
    """Rebuild on this side the error that a peer reported."""
    return _BY_CODE.get(code, EmulatorError)(text, definite=definite)
