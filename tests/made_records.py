"""Single records with plausible values, for the tests of figures that need one field or two."""

from __future__ import annotations

from emulator import metrics
from emulator.kvcache import Layout
from emulator.records import NodeRecord, PortBytes, RequestRecord, RunRecords
from emulator.scale import Scale

__all__ = ["STAMPS", "port", "request", "run", "setup"]

STAMPS = (
    "arrived_s",
    "eligible_s",
    "scheduled_s",
    "allocated_s",
    "read_s",
    "prefill_start_s",
    "computed_s",
    "transferred_s",
    "first_token_s",
    "last_token_s",
)


def request(stamps: tuple[float, ...] = tuple(range(10)), /, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "id": "a.0",
        "trajectory": "a",
        "turn": 0,
        "status": "done",
        "path": "pe",
        "prompt_tokens": 200,
        "hit_tokens": 128,
        "output_tokens": 3,
        **dict(zip(STAMPS, map(float, stamps), strict=True)),
        **changes,
    }
    return RequestRecord(**values)  # type: ignore[arg-type]


def run(*requests: RequestRecord, nodes: tuple[NodeRecord, ...] = (), ended_s: float = 10.0) -> RunRecords:
    return RunRecords(t0_s=0.0, ended_s=ended_s, requests=requests, nodes=nodes)


def port(nic: str, windows: tuple[int, ...], window_s: float = 1.0, direction: str = "write") -> PortBytes:
    return PortBytes(
        nic=nic,
        direction=direction,  # type: ignore[arg-type]
        lane=2,
        payload_bytes=sum(windows),
        messages=len(windows),
        busy_s=len(windows) * window_s,
        window_s=window_s,
        windows=windows,
        under_way_bytes=max(windows, default=0),
    )


def setup(*ports: metrics.Port, groups: tuple[tuple[str, ...], ...] = ()) -> metrics.Setup:
    scale = Scale(model_kv_bytes=704, kv_bytes=4)
    return metrics.Setup(layout=Layout(2, 4), scale=scale, ports=ports, groups=groups)
