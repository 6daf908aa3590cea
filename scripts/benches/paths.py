"""`emulate run 1p1d` on the io-bound sample: what the second read path is worth, every request proved."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from .commands import emulate, need_root, runs
from .figures import Figure, show

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Both paths forced in turn, then chosen; on links, and for comparison in virtual time."""
    need_root("paths")
    asked = ("1p1d", "--trace", "io-bound", "--warm", "--path", "pe", "--path", "de", "--path", "auto")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        live, _ = runs("run", *asked, "--out", str(out))
        verified = [emulate("verify", str(each)).returncode for each in sorted(out.iterdir())]
    virtual, _ = runs("sim", *asked)
    figures = [
        Figure("requests not done, of all three runs", sum(_missing(r) for r in live), "", high=0),
        Figure(
            "runs whose tokens differ from the reference's", sum(not r["tokens_equal"] for r in live), "", high=0
        ),
        Figure("runs that are not valid", sum(r["verdict"] != "valid" for r in live), "", high=0),
        Figure("runs that emulate verify refuses", sum(code != 0 for code in verified), "", high=0),
    ]
    for run, twin in zip(live, virtual, strict=True):
        figures += [
            Figure(f"--path {run['path']}: JCT", run["jct_s"], "s"),
            Figure(f"--path {run['path']}: JCT to that in virtual time", run["jct_s"] / twin["jct_s"], "x"),
        ]
    jct = {run["path"]: run["jct_s"] for run in live}
    figures.append(Figure("JCT of --path pe to auto", jct["pe"] / jct["auto"], "x", low=1.4))
    figures.append(Figure("wall time of the three runs", sum(run["wall_s"] for run in live), "s"))
    return show(figures, as_json="--json" in argv)


def _missing(run: dict[str, dict[str, int]]) -> int:
    return run["requests"]["total"] - run["requests"]["done"]
