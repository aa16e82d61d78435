"""Measures specjax and alternatives to it: ``python -m benchmarks SUITE``."""
