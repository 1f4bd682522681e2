"""The parts of bench_serving.py: start a whole system, ask it one thing at a time, turn the times into figures.

Never judges a figure beyond saying whether its goal holds, and leaves no process and no file behind.
Start with measure.py, then system.py.
"""
