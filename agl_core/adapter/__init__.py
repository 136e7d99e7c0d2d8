"""Recorded spans to training triplets: pure functions over columns."""
