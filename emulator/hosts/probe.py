"""Try on this host what a cluster needs of the kernel, in namespaces that are gone a moment later.

``python -m emulator.hosts.probe`` runs the trials in a process of its own, because isolation cannot be undone, and
prints one JSON object a line, {"trial", "ok", "detail"}; the first that fails ends it. The trials are the
product's own acts on the smallest cluster, so what passes here works there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

from topology.errors import TopologyError
from topology.namespaces import new_netns
from topology.netns import realise
from topology.spec import AddressPlan, ClusterSpec

from .isolate import IsolationError, enter_user_namespace, open_pid_namespace

__all__ = ["TRIALS", "main", "run_trials"]

TRIALS = ("user namespace", "network namespace", "links", "PID namespace")
_RATE_BYTES_S = 1e7
_PATIENCE_S = 30.0


def run_trials() -> dict[str, tuple[bool, str]]:
    """Trial -> (passed, detail), in order; a trial that could not be reached any more is absent."""
    # Threads of numeric libraries would forbid isolation.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "emulator.hosts.probe"],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    found = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        found[row["trial"]] = (row["ok"], row["detail"])
    if done.returncode != 0 and all(ok for ok, _ in found.values()):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        found[next(trial for trial in TRIALS if trial not in found)] = (False, last[0])
    return found


def _try_user() -> str:
    if os.geteuid() == 0:
        return "not needed: root"
    enter_user_namespace()
    return "made"


def _try_network() -> str:
    os.close(new_netns())
    return "made"


def _try_links() -> str:
    """The links of the smallest cluster, made and read back."""
    spec = ClusterSpec(name="probe", pe_nodes=1, de_nodes=1, gpus_per_node=1, storage_nodes=1)
    with ExitStack() as stack:
        holders = {}
        for node in spec.nodes:
            holders[node.name] = new_netns()
            stack.callback(os.close, holders[node.name])
        rates = {(port.node, port.nic.name): _RATE_BYTES_S for port in spec.ports()}
        network = realise(spec, AddressPlan(spec), rates, holders)
        network.close()
    return "veth, bridge, HTB, u32 and source routing made and read back"


def _try_pid() -> str:
    namespace = open_pid_namespace()
    namespace.kill()
    namespace.wait(_PATIENCE_S)
    return "made, its init bound to its parent's life"


def main() -> None:
    """Run all trials; exit code 1 with the first that fails."""
    acts: tuple[Callable[[], str], ...] = (_try_user, _try_network, _try_links, _try_pid)
    for trial, act in zip(TRIALS, acts, strict=True):
        try:
            ok, detail = True, act()
        except (IsolationError, TopologyError, OSError) as error:
            ok, detail = False, str(error.strerror if isinstance(error, OSError) else error)
        print(json.dumps({"trial": trial, "ok": ok, "detail": detail}), flush=True)
        if not ok:
            sys.exit(1)


if __name__ == "__main__":
    main()
