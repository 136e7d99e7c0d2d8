"""The store: which rollouts there are, who runs them, what they left.

`LightningStore` is the contract; algorithms and runners know nothing else of each other.
"""
