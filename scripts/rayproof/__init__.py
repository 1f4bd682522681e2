"""Three hosts on one machine, for scripts/ray_up_proof.py.

stage.py leaves the machine's own network, files and processes for private ones; network.py makes a network there and
hosts.py the hosts on it, each with its SSH server; commands.py types what README's "On several machines" says.
Nothing here outlives the process that called it: the kernel ends all of it when that process ends, however it ends.
"""
