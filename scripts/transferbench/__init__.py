"""The parts of bench_transfer.py: each transport between two processes beside the raw limit of what carries it.

Also the handoff of a whole system. Measures through the public ends of kv_transfer alone, and judges nothing beyond
saying whether a goal holds. Start with measure.py, then peer.py.
"""
