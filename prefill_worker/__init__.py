"""Runs prompts: admit, step, push each layer group's KV to the decode worker, answer with the first token.

Holds no KV that nobody has promised to take, and never decodes past the first token.
Start with worker.py.
"""
