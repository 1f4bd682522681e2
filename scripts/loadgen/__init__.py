"""The parts of scripts/load_test.py: what to send, how to send it, what came back, how it reads.

Measures a server from outside, as its clients see it; knows nothing of pdserve's workers.
Start with runner.py (one request from its schedule to its record), then metrics.py (what the numbers mean).
"""
