"""The command's entry: it answers Ctrl-C from its first line on, before the command line itself is loaded."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run `emulate`, also as ``python -m emulator`` where that is not on the path."""
    try:
        from .cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("emulate: interrupted\n")
        sys.exit(130)
    command(prog_name="emulate")


if __name__ == "__main__":
    main()
