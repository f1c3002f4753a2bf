"""bash scripts/python.sh docs/programs/holes.py"""

memory = [None] * 12  # a device of 12 blocks


def allocate(name, size):
    for at in range(len(memory) - size + 1):
        if not any(memory[at : at + size]):
            memory[at : at + size] = [name] * size
            return
    print(f"{name}: no {size} blocks side by side, though {memory.count(None)} of {len(memory)} are free")


for name in "aBcDeF":
    allocate(name, 2)
memory = [None if name in "BDF" else name for name in memory]  # free every second one
print("".join(name or "." for name in memory))
allocate("g", 3)
