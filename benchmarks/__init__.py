"""Measures specjax, and what a user would pick instead: ``python -m benchmarks SUITE``."""
