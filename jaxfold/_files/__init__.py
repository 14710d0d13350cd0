"""Checkpoint files: reading trees of leaves that load on demand, and writing them with the bytes of the rest copied."""
