"""What bench_kernels.py runs: workloads in the shapes of SmolLM2-135M, natively and in torch, and the machine's limits.

Never starts an engine. Start with workloads.py.
"""
