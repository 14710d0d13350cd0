"""Scripts that measure: ``python -m benchmarks.block`` for speed, ``python -m benchmarks.accuracy`` for errors."""
