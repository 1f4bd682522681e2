"""What two pdserve processes must agree on: config, errors, a request's life, the KV layout, sampling, RPC conventions.

Never imports torch or any other pdserve package, and does no serving of its own.
Start with lifecycle.py (what happens to a request) and errors.py (how it can end).
"""

import os

# Before anything imports grpc: its C core otherwise reports ordinary shutdowns on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
