"""CPU kernels of our own, for bfloat16 where the machine multiplies it natively (AVX512-BF16), compiled at first use.

Never decides when to use them, and knows no model: load_native gives None where they cannot be had, and says why.
Start with kernels.py for what there is, then src/tile.h, where nearly all the time is spent.
"""
