"""What bench_engine.py measures: one engine's prefill and decode, the machine's limits, and transformers beside them.

Engines run in this process, with neither worker nor router. Start with measure.py.
"""
