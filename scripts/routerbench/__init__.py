"""The parts of bench_router.py: a real router between stub workers that stream without an engine and lean clients.

The router is the product's own process, on a core of its own; nothing of it is replaced. Stubs speak the workers' side
of proto/serving.proto. Never judges a figure beyond saying whether its goal holds, and leaves no process behind.
Start with measure.py, then stub_workers.py.
"""
