"""CPU kernels of our own, for bfloat16 where the machine multiplies it natively (AVX512-BF16), compiled at first use.

Never decides when to use them: load_native gives None where they cannot be had, and says why.
Start with forward.py for a step, kernels.py for what there is, then src/tile.h, where nearly all the time is spent.
"""
