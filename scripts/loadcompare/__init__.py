"""load_test.py --compare: disaggregated, colocated or any other server, each under the same workloads in turn.

Starts and stops pdserve's systems itself, with the bench's own servingbench/system.py; measures them with loadgen.
Start with compare.py, then workloads.py and running_streams.py.
"""
