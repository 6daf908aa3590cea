"""One module a benchmark, each with ``main(argv) -> exit code``, printing through ``figures``."""
