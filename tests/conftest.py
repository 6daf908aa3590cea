"""Async tests run under trio, in virtual time unless marked otherwise by their own fixtures."""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import Phase, settings

# A busy machine is slow, not wrong. The same examples on every run: a commit is judged by what it changed, not by
# luck. To look for more: scripts/test --hypothesis-profile=search
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("quick", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("same")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def test_*`` with ``trio.run``; fixtures stay synchronous."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    trio.run(partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say plainly what is left out and why."""
    no_root = pytest.mark.skip(reason="needs root: run `sudo scripts/test`")
    no_shared = pytest.mark.skip(reason="the public traces are not beside this checkout")
    for item in items:
        if "root" in item.keywords and os.geteuid() != 0:
            item.add_marker(no_root)
        if "shared" in item.keywords and not SHARED.is_dir():
            item.add_marker(no_shared)


@pytest.fixture
def shared() -> Path:
    """The folder of public traces; tests that use it are marked ``shared``."""
    return SHARED
