"""Benchmarks: what a rollout, a start-up and Core itself cost."""
