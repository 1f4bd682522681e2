"""Replays a trace in simulated time: the router's own policies and index, workers that only cost time.

simulation.py is the clock and the queue, stub_worker.py what workers are, cost.py how long they take; figures.py and
report.py say what came out.
"""
