"""Side-by-side speed and memory: `python -m bench.run`. Nothing here is imported by the package or its tests."""
