"""The parts of chaos.py: a real deployment, load on it, faults in it, and what became of every request.

Signals go to processes that it started itself, and to no others. Judges answers, never repairs anything.
Start with run.py, then outcome.py.
"""
