"""The pdserve command, and the hosts of router and workers: supervised local processes or Ray actors.

Tokens and KV never pass through here.
Start with cli.py, then host.py.
"""
