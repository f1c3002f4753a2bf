"""bash scripts/python.sh docs/programs/peak.py"""

import torch

from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.metrics import peak_bytes


def say(what):
    print(f"{peak_bytes(torch.device('cpu')) / 2**20:5.0f} MiB  {what}")


say("Python, torch and their libraries")
model = GPT2LMHeadModel(ModelConfig(vocab_size=4096))  # ModelConfig's default is tiny
say("and the parameters")
ids = torch.randint(4096, (24, 129))
loss = model(ids[:, :-1], ids[:, 1:])
say("and activations, at the end of forward")
loss.backward()
torch.optim.AdamW(model.parameters()).step()
say("and the rest of a step")
