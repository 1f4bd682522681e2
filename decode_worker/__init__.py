"""Reserves blocks, receives KV, and decodes with continuous batching; colocated, it computes the prompt itself.

Never runs a sequence whose KV is not complete and verified.
Start with worker.py.
"""
