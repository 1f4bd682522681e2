"""Paged attention backends behind one call (base.py); torch_reference.py is the oracle for every other one."""
