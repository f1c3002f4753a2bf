"""python docs/programs/peak.py"""

from dataclasses import replace

import torch

from gpt2_chinese.config import PRESETS
from gpt2_chinese.model import GPT2LMHeadModel
from gpt2_chinese.runlog import peak_bytes

say = lambda what: print(f"{peak_bytes(torch.device('cpu')) / 2**20:5.0f} MiB  {what}")  # noqa: E731
say("Python, torch and their libraries")
model = GPT2LMHeadModel(replace(PRESETS["tiny"], vocab_size=4096))
optimizer = torch.optim.AdamW(model.parameters())
say("and the parameters")
ids = torch.randint(4096, (24, 129))
loss = model(ids[:, :-1], ids[:, 1:])
say("and activations, at the end of forward")
loss.backward()
optimizer.step()
say("and the rest of a step")
