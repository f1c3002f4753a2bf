"""Files, folders and torch's distributed checkpoints that are complete or absent on a disk. Imports no other package."""
