"""The stages of an iteration, each a function over the ledger: what both drivers have in common.

A stage that has a record is not run again. The Prefect tasks of the pipeline call these, and so
does an algorithm that is run over a store; between `publish` and `collect` each runs the rollouts
in its own way.
"""
