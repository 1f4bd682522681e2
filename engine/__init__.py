"""Token ids in, token ids out: the model, its paged KV cache, the scheduler, the sampler, and the one step loop.

Never sees text, the network, or a worker's role.
Start with engine.py: Engine.step is the only loop body in the project.
"""
