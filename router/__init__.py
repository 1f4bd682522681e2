"""The front door: OpenAI HTTP and gRPC in, tokenize, queue, choose a (prefill, decode) pair, stream the answer out.

Never imports torch and never sees a KV byte.
Start with pipeline.py: serve() is the whole journey of a request.
"""
