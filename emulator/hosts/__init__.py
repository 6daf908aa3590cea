"""The processes that host roles on Linux: isolation, the supervisor, a node's process, and what they keep.

``supervisor`` is the parent of all of a cluster's processes; ``nodeprocess`` starts and commands a ``node``,
which isolates itself and becomes a ``station`` that runs roles. ``control`` is what they say to one another;
``state`` and ``processes`` are what is on record of a cluster. This package must stay light: a node imports it
before it gives its privileges up.
"""
