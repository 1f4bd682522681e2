"""Model families, one small file each: how its files are recognised and in what it differs from Llama.

Never computes anything: the forward pass is decoder.py's, and all it knows of a family is the ModelConfig. Start with
family.py; a new family is a file like qwen3.py and a line in catalog.py.
"""
