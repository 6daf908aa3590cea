"""A log never stops what it logs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from emulator.logs import configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave structlog as other tests expect it."""
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_json_lines(tmp_path: Path) -> None:
    """Each with its process, level, UTC time and key-values; an exception with its trace."""
    path = tmp_path / "log"
    with path.open("w") as file:
        configure_logs("pe0", file.fileno())
        try:
            raise ValueError("x")
        except ValueError as error:
            structlog.get_logger().error("run_failed", size_bytes=3, exc_info=error)
    (row,) = _lines(path)
    assert row.items() >= {"event": "run_failed", "process": "pe0", "level": "error", "size_bytes": 3}.items()
    assert str(row["timestamp"]).endswith("Z") and "ValueError: x" in str(row["exception"])


def test_a_full_disk_costs_lines_and_says_how_many(tmp_path: Path) -> None:
    """Lines that cannot be written are dropped without an error, and counted in the next that can."""
    path = tmp_path / "log"
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        configure_logs("pe0", fd)
        for _ in range(3):
            structlog.get_logger().info("dropped")
        with path.open("w") as file:
            os.dup2(file.fileno(), fd)
        structlog.get_logger().info("written")
        structlog.get_logger().info("written")
    finally:
        os.close(fd)
    lost, *rest = _lines(path)
    assert lost == {"event": "log_lines_lost", "lines": 3}
    assert [row["event"] for row in rest] == ["written", "written"]
