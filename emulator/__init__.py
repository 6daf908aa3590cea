"""DualPath emulator: a disaggregated LLM-serving cluster with two KV read paths, on one machine.

Pure modules (kvcache, pool, policy, costmodel, workload, metrics, verify, judge, analysis, scale ...)
are at the bottom; ``fabric`` and ``store`` move and keep bytes; ``roles`` is what nodes do, written once
against the ``Fabric`` interface; ``hosts`` and ``cluster`` run roles in network namespaces, ``sim`` in virtual
time; ``report``, ``study`` and ``cli`` are on top.
"""
