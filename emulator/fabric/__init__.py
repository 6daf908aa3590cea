"""The network as roles see it (``interface``), over sockets (``tcp``) and in virtual time (``fluid``)."""
