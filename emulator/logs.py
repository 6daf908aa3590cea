"""Logs of the background processes: structlog events as JSON lines on standard error, which is a file.

A log is never worth a run: a line that cannot be written (a full disk) is dropped and counted, and the count
goes out with the next line that can be. Measurements do not belong here but in the run's records.
"""

from __future__ import annotations

import os

import structlog

__all__ = ["configure_logs"]


class _LossyFile:
    """What structlog's writer wants of a file, over a descriptor that may refuse."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lost = 0

    def write(self, text: str) -> None:
        line = text if not self.lost else f'{{"event": "log_lines_lost", "lines": {self.lost}}}\n{text}'
        try:
            os.write(self._fd, line.encode())
        except OSError:
            self.lost += 1
        else:
            self.lost = 0

    def flush(self) -> None:
        """Nothing is kept back."""


def configure_logs(process: str, fd: int = 2) -> None:
    """Send this process's log events to ``fd``, each with its UTC time, level and ``process``."""
    structlog.reset_defaults()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=_LossyFile(fd)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
