"""The parts of gpu_check.py: each check is a function that yields figures, and knows nothing of the others.

They run on any device, so that tests run them on a CPU; only gpu_check.py insists on a GPU.
Start with figures.py, then checks.py.
"""
