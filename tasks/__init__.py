"""Prefect tasks: one thin function for each unit with its own retry, name and line in the UI.

A task reads references, calls library code of `agl_core`, writes to the ledger, and returns a
reference.
"""
