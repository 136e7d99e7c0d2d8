"""The ledger: immutable, hashed files that say what happened; Prefect's UI is a view of it."""
