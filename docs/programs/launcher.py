"""bash scripts/python.sh docs/programs/launcher.py 2 docs/programs/hello.py"""

import os
import socket
import subprocess
import sys

num_ranks, program = int(sys.argv[1]), sys.argv[2:]
with socket.socket() as free:  # finds an unused port
    free.bind(("127.0.0.1", 0))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(num_ranks)}
ranks = []
for rank in map(str, range(num_ranks)):
    environment = os.environ | place | {"RANK": rank, "LOCAL_RANK": rank}
    ranks.append(subprocess.Popen([sys.executable, *program], env=environment))
sys.exit(max(abs(rank.wait()) for rank in ranks))  # if one rank fails, the job fails
