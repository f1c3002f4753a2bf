"""bash scripts/python.sh docs/programs/start_cost.py"""

import subprocess
import sys
import time

place = "'gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1"
join = f"import torch.distributed as dist; dist.init_process_group({place})"
for what, code in {"an empty program": "pass", "import torch": "import torch", "and join a group": join}.items():
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    print(f"{what:<18}{time.perf_counter() - begin:.1f} s")
