"""Scripts of the project; ``benches`` are the measurements behind ``scripts/bench``."""
