"""A folder of recorded coding-agent sessions on 1p1d: every request served, proved, and the host judged able."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .commands import need_root, runs
from .figures import Figure, show

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
DILATION = "0.6"
"""The sessions load the storage NIC by 1 to 2 % and decode for minutes, so time may pass faster than it is."""


def main(argv: Sequence[str]) -> int:
    """``scripts/bench weka [FOLDER]``: by default the traces beside the checkout."""
    need_root("weka")
    folders = [Path(word) for word in argv if not word.startswith("-")] or [
        ROOT.parent / "shared" / "traces" / "weka"
    ]
    if not folders[0].is_dir():
        print(f"scripts/bench weka: {folders[0]}: no such folder of sessions; name one", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    asked = ("--trace", str(folders[0]), "--trace-format", "weka", "--max-len", "65536", "--dilation", DILATION)
    (run,), _ = runs("run", "1p1d", *asked)
    wall_s = time.monotonic() - began_s
    for reason in run["verdict_reasons"]:
        print(reason, file=sys.stderr)
    return show(
        [
            Figure("requests", run["requests"]["total"], ""),
            Figure("requests not done", run["requests"]["total"] - run["requests"]["done"], "", high=0),
            Figure("tokens differ from the reference's", not run["tokens_equal"], "", high=0),
            Figure("broken invariants", len(run["invariants"]["broken"]), "", high=0),
            Figure("not valid", run["verdict"] != "valid", "", high=0),
            Figure("JCT", run["jct_s"], "s"),
            Figure("hit ratio", run["hit_ratio"], ""),
            Figure("wall time, command included", wall_s, "s", high=600),
        ],
        as_json="--json" in argv,
    )
