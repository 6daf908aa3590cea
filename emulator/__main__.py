"""``python -m emulator``: the command line, where `emulate` is not on the path."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="emulate")
