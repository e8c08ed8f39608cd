"""Benchmarks: ``python -m benchmarks NAME [--peer tf] [--json]``. How to repeat them: docs/benchmarks.md."""
