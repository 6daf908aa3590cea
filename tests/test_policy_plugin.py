"""A user's policy from a file decides as it says, and whatever it does wrong is told with its file and line."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import ConfigError, PolicyError
from emulator.policy import Load, Policy, PolicySetup, Queued, dualpath, make_policy
from emulator.policy.plugin import ANSWER_LIMIT_S, load_policy

PES, DES = ("pe0/0", "pe0/1"), ("de0/0", "de0/1", "de1/0")
SETUP = PolicySetup(PES, DES, alpha_tokens=50, beta_tokens=100, seed=3)
QUEUE = [Queued(f"r{at}", at, 10 + at, 5, 3) for at in range(3)]
ENGINES = [Load(name, "pe0", 0, 0, 0, 0) for name in PES]
GROUPS = {"de0": 0, "de1": 7}
SOON_S = 0.2
"""A limit for policies that never answer."""

GOOD = """
class Mine:
    def __init__(self, setup):
        self.setup = setup

    def assign_prefill(self, queue, engines):
        {assign}

    def route_decode(self, queue, groups):
        {route}

    def assign_decode(self, queue, engines):
        return [engines[0].engine]

    def choose_path(self, request, pe_read_queue, de_read_queue):
        {path}


def make_policy(setup):
    {make}
"""
LINES = {"assign": 7, "route": 10, "path": 16, "make": 20}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """A policy's file in which the body of one method is replaced."""

    def write(**bodies: str) -> Path:
        parts = {
            "assign": "return [engines[0].engine] * len(queue)",
            "route": "return [next(iter(groups))] * len(queue)",
            "path": "return 'de'",
            "make": "return Mine(setup)",
            **bodies,
        }
        path = tmp_path / "mine.py"
        path.write_text(GOOD.format(**parts))
        return path

    return write


def ask_all(policy: Policy) -> None:
    policy.assign_prefill(QUEUE, ENGINES)
    policy.route_decode(QUEUE, GROUPS)
    policy.assign_decode(QUEUE, ENGINES)
    policy.choose_path(QUEUE[0], 0, 0)


def test_a_file_decides(written: Callable[..., Path]) -> None:
    """Its answers are passed on as they are."""
    policy = load_policy(written(), SETUP)
    assert policy.assign_prefill(QUEUE, ENGINES) == ("pe0/0",) * 3
    assert policy.route_decode(QUEUE, GROUPS) == ("de0",) * 3
    assert policy.assign_decode(QUEUE, ENGINES) == ("pe0/0",)
    assert policy.choose_path(QUEUE[0], 0, 0) == "de"
    assert ANSWER_LIMIT_S == 5.0


def test_the_guide_s_example_is_a_policy(tmp_path: Path) -> None:
    """The code in docs/policies.md loads, and answers every question."""
    guide = Path(__file__).parents[1] / "docs" / "policies.md"
    path = tmp_path / "mine.py"
    path.write_text(guide.read_text().split("```python\n")[1].split("```")[0])
    policy = load_policy(path, SETUP)
    assert policy.assign_prefill(QUEUE, ENGINES) == ("pe0/0", "pe0/1", "pe0/0")
    assert policy.route_decode(QUEUE, GROUPS) == ("de0", "de1", "de0")
    assert policy.choose_path(QUEUE[0], 3, 2) == "de"


def own_policy(folder: Path) -> Policy:
    """DualPath's own source as a user's file."""
    source = Path(dualpath.__file__).read_text().replace("from .", "from emulator.policy.")
    path = folder / "copied.py"
    path.write_text(source + "\n\nmake_policy = DualPath\n")
    return load_policy(path, SETUP)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return own_policy(tmp_path_factory.mktemp("policy"))


TOKENS = st.integers(0, 120)
QUEUES = st.lists(st.tuples(TOKENS, TOKENS, TOKENS), max_size=12).map(
    lambda rows: [Queued(f"r{at}", at, *row) for at, row in enumerate(rows)]
)
LOADS = st.lists(st.tuples(st.integers(0, 4), TOKENS, TOKENS, st.integers(0, 900)), min_size=1, max_size=6).map(
    lambda rows: [Load(f"n0/{at}", "n0", *row) for at, row in enumerate(rows)]
)


@given(QUEUES, LOADS, st.lists(TOKENS, min_size=1, max_size=5))
def test_our_own_policy_from_a_file_decides_the_same(
    copied: Policy, queue: list[Queued], engines: list[Load], groups: list[int]
) -> None:
    """Loading and checking change no decision."""
    ours = make_policy("dualpath", SETUP)
    by_name = {f"g{at}": tokens for at, tokens in enumerate(groups)}
    assert list(copied.assign_prefill(queue, engines)) == list(ours.assign_prefill(queue, engines))
    assert list(copied.route_decode(queue, by_name)) == list(ours.route_decode(queue, by_name))
    assert list(copied.assign_decode(queue, engines)) == list(ours.assign_decode(queue, engines))
    for request, load in zip(queue, engines, strict=False):
        queues = (load.read_queue, load.tokens)
        assert copied.choose_path(request, *queues) == ours.choose_path(request, *queues)


def told(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise BaseException('two\\nlines')", "BaseException: two lines"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("self.assign_prefill(queue, engines)", "RecursionError"),
        ("queue.pop(0)", "AttributeError"),
        ("engines[0].tokens = 3", "AttributeError"),
        ("return [int('x')]", "ValueError: invalid literal"),
    ],
)
def test_what_it_raises_is_told_with_its_line(written: Callable[..., Path], body: str, says: str) -> None:
    """Any exception, also one that is no Exception, names the innermost line of the file."""
    path = written(assign=body)
    with pytest.raises(PolicyError) as error:
        ask_all(load_policy(path, SETUP))
    assert told(error).startswith(f"{path}:{LINES['assign']}: assign_prefill: ")
    assert says in told(error)


def test_the_innermost_line_of_the_file_is_named(written: Callable[..., Path]) -> None:
    """Not the one that called, nor one in a library that was called."""
    path = written(assign="return helper()")
    path.write_text(path.read_text() + "\n\ndef helper():\n    import json\n    return json.loads('{')\n")
    with pytest.raises(PolicyError, match=r"mine\.py:25: assign_prefill: json\.decoder\.JSONDecodeError: "):
        ask_all(load_policy(path, SETUP))


@pytest.mark.parametrize(
    ("part", "body", "says"),
    [
        ("assign", "return None", "answered a NoneType; expected a list with the engine of each request"),
        ("assign", "return 'pe0/0'", "answered 'pe0/0'; expected a list"),
        ("assign", "return {'pe0/0'}", "answered a set"),
        ("assign", "return iter(['pe0/0'])", "answered a list_iterator"),
        ("assign", "return ['pe9/0']", "gave request 'r0' the engine 'pe9/0'; offered were pe0/0, pe0/1"),
        ("assign", "return ['pe0/0', 'de0/0']", "gave request 'r1' the engine 'de0/0'"),
        ("assign", "return [0]", "the engine a int"),
        ("assign", "return [['pe0/0']]", "the engine a list"),
        ("assign", "return ['pe0/0'] * 4", "answered for more than the 3 requests it was asked about"),
        ("route", "return ['de0']", "answered for 1 of 3 requests; every one needs a group"),
        ("route", "return ['de0/0'] * 3", "the group 'de0/0'; offered were de0, de1"),
        ("path", "return None", "answered a NoneType for request 'r0'; a path is 'pe' or 'de'"),
        ("path", "return 'split'", "answered 'split'"),
        ("path", "return ['pe']", "answered a list"),
    ],
)
def test_an_answer_that_cannot_be_followed_is_told(
    written: Callable[..., Path], part: str, body: str, says: str
) -> None:
    """Not a list of what was offered, or not of the right length: named with the method's line."""
    path = written(**{part: body})
    with pytest.raises(PolicyError) as error:
        ask_all(load_policy(path, SETUP))
    assert told(error).startswith(f"{path}:{LINES[part] - 1}: ")
    assert says in told(error)


HANGS = [
    "while True: pass",
    "__import__('time').sleep(1000)",
    "__import__('threading').Event().wait()",
    "return list(map(idle, iter(int, 1)))",
]


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """What arrives at a handler of SIGALRM that was there before."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    yield seen
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("body", HANGS)
def test_a_policy_that_never_answers_is_ended(written: Callable[..., Path], alarms: list[int], body: str) -> None:
    """Computing, sleeping, waiting, or answering without end: told with the line; signals are as they were."""
    path = written(assign=body)
    path.write_text(path.read_text() + "\n\ndef idle(_):\n    __import__('time').sleep(0.01)\n")
    policy = load_policy(path, SETUP, limit_s=SOON_S)
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(PolicyError) as error:
        policy.assign_prefill(QUEUE, ENGINES)
    line = 24 if "idle" in body else LINES["assign"]
    assert told(error) == f"{path}:{line}: assign_prefill: no answer within 0.2 s; it was here"
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert alarms == []


def test_an_endless_answer_is_too_long(written: Callable[..., Path]) -> None:
    """It is not read to its end."""
    path = written(assign="return Endless(['pe0/0'])")
    path.write_text(
        path.read_text() + "\n\nclass Endless(list):\n    def __iter__(self):\n        return iter(int, 1)\n"
    )
    with pytest.raises(PolicyError, match="answered for more than the 3 requests"):
        load_policy(path, SETUP).assign_prefill(QUEUE, ENGINES)


@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
@pytest.mark.parametrize("does", ["sum(range(10))", "sleep(1000)"])
def test_catching_everything_is_no_way_to_go_on(written: Callable[..., Path], caught: str, does: str) -> None:
    """A loop that goes on after every exception is ended all the same."""
    lines = (
        "from time import sleep",
        "while True:",
        "    try:",
        f"        {does}",
        f"    except {caught}:",
        "        pass",
    )
    policy = load_policy(written(assign=("\n" + 8 * " ").join(lines)), SETUP, limit_s=SOON_S)
    with pytest.raises(PolicyError, match="no answer within"):
        policy.assign_prefill(QUEUE, ENGINES)


def test_an_alarm_of_somebody_else_still_comes(written: Callable[..., Path], alarms: list[int]) -> None:
    """A timer that was running goes on running, less the time that the policy took."""
    policy = load_policy(written(assign="__import__('time').sleep(0.05); return []"), SETUP)
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    policy.assign_prefill(QUEUE, ENGINES)
    assert 1 < signal.getitimer(signal.ITIMER_REAL)[0] < 60.0 - 0.05
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    policy.assign_prefill(QUEUE, ENGINES)
    began_s = time.monotonic()
    while not alarms and time.monotonic() < began_s + 30:
        time.sleep(0.001)
    assert alarms == [signal.SIGALRM]


@pytest.mark.parametrize("body", [*HANGS[:3], "return 1 / 0", "return ['pe0/1']"])
def test_other_threads_are_served_alike(written: Callable[..., Path], body: str) -> None:
    """Outside the main thread the same answers and the same errors come, and no signal is touched."""
    policy = load_policy(written(assign=body), SETUP, limit_s=SOON_S)
    results: list[object] = []

    def ask() -> None:
        try:
            results.append(policy.assign_prefill(QUEUE, ENGINES))
        except PolicyError as error:
            results.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    if "pe0/1" in body:
        assert results == [("pe0/1",)]
    else:
        says = "ZeroDivisionError: division by zero" if "1 / 0" in body else "no answer within 0.2 s; it was here"
        assert results == [f"{written(assign=body)}:{LINES['assign']}: assign_prefill: {says}"]


def test_an_interrupt_is_nobody_s_mistake(written: Callable[..., Path]) -> None:
    """Ctrl-C while a policy thinks is not an error of the policy."""
    policy = load_policy(written(assign="__import__('signal').raise_signal(2); return []"), SETUP)
    with pytest.raises(KeyboardInterrupt):
        policy.assign_prefill(QUEUE, ENGINES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"def make_policy(setup):\n    return (\n", ":2: not valid Python: '(' was never closed"),
        (b"x = 1\n\x7fELF", ":2: not valid Python: "),
        (b"\x7fELF\0\0\0", ":1: not valid Python: "),
        (b"\xff\xfex\0", ":1: not valid Python: "),
        (b"x = 1\nname = 'n\xe4'\n", ":2: not valid Python: "),
        (b"(" * 5000 + b")" * 5000, ":1: not valid Python: "),
        (b"", ": it defines no make_policy(setup)"),
        (b"make_policy = 3\n", ": it defines no make_policy(setup)"),
        (b"x = 1\nimport no_such_module\n", ":2: on loading: ModuleNotFoundError: No module named"),
        (b"raise SystemExit\n", ":1: on loading: SystemExit"),
        (b"x = 1\nwhile True: pass\n", ":2: on loading: no answer within 0.2 s; it was here"),
        (b"def make_policy():\n    pass\n", ":1: make_policy: TypeError: make_policy() takes 0 positional"),
        (b"\ndef make_policy(setup):\n    return 1 / 0\n", ":3: make_policy: ZeroDivisionError"),
        (b"def make_policy(setup):\n    while True: pass\n", ":2: make_policy: no answer within 0.2 s"),
        (
            b"def make_policy(setup):\n    return setup\n",
            ":1: make_policy: returned a PolicySetup, which has no assign_pr",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: bytes, says: str) -> None:
    """Before the first question: one line with the file, the line where there is one, and what is wrong."""
    path = tmp_path / "mine.py"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load_policy(path, SETUP, limit_s=SOON_S)
    assert told(error).startswith(str(path))
    assert says in told(error)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Nothing, a folder, and a FIFO, which would be waited for for ever."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="does not exist; a policy is a Python file"):
        load_policy(tmp_path / "none.py", SETUP)
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_policy(tmp_path, SETUP)
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_policy(tmp_path / "fifo", SETUP)


def test_a_file_may_use_dataclasses_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """It is a module like any other, without a cache beside it."""
    path = tmp_path / "json.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from emulator.policy import PolicySetup, make_policy as named\n\n\n"
        "@dataclass\nclass Mine:\n    setup: PolicySetup\n    seen: int = 0\n\n\n"
        "def make_policy(setup):\n    Mine(setup)\n    return named('round-robin', setup)\n"
    )
    assert load_policy(path, SETUP).assign_prefill(QUEUE, ENGINES) == ("pe0/0", "pe0/1", "pe0/0")
    assert list(tmp_path.iterdir()) == [path]
    import json

    assert json.loads("1") == 1
