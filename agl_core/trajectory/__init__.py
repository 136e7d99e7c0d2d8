"""Triplets to the rows of a training batch, and what became of every rollout: pure functions over
columns.
"""
