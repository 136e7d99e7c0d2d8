"""Models behind the proxy: the embedded engine, its launch, and digests of what is served."""
