"""Moves KV cache between two workers' pools: checked pieces, then a commit.

Knows tensors and the KVLayout; never sequences, schedulers, text or a worker's role.
Start with transport.py (the protocols), wire.py and assembly.py (pieces, checksums, commit), then link.py.
"""
