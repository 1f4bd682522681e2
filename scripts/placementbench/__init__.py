"""The parts of bench_placement.py: start each configuration, load it, turn records into figures.

Leaves no process and no file behind. Start with measure.py.
"""
