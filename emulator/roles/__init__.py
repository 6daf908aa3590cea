"""What the nodes of a cluster do, written once against the ``Fabric`` interface.

``messages`` are what they say to each other, ``segments`` what they move. ``traffic`` sends it, ``blockio`` and
``drampool`` bring blocks, ``leases`` queue for memory, ``leader`` pulls work and ``lockstep`` keeps a group
together. ``scheduler``, ``prefill``, ``decode``, ``storage`` and ``client`` are the roles; ``serving`` makes
any of them.
"""
