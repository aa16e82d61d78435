"""The fuzzer: random compositions against references that share nothing with the loop."""
