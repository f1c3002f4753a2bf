"""Mistake 5: a schedule over all batches of the corpus, although each process takes only its part of them.

    python chapters/04_apex/mistakes/schedule_without_processes.py

The run ends long before the schedule, so the learning rate hardly decays. The cure: count steps, not batches.
"""

from types import SimpleNamespace

from gpt2_chinese.run.optim import learning_rate

NUM_BATCHES, PEAK = 8000, 1e-3  # batches of the corpus, each for one process

for num_processes in (1, 2, 4, 8):
    steps = NUM_BATCHES // num_processes  # a step takes one batch on each process
    last = {}
    for name, believed in (("wrong", NUM_BATCHES), ("right", steps)):
        schedule = SimpleNamespace(lr=PEAK, warmup_steps=100, max_steps=believed)
        last[name] = learning_rate(steps, schedule) / PEAK
    ends = f"ends at {last['wrong']:.0%} of the peak (wrong), {last['right']:.0%} (right)"
    print(f"{num_processes} processes, {steps} steps: {ends}")
