"""What `benchmarks/bench.py` measures. Each module holds the children of one kind of measurement."""
