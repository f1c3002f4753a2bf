"""Files, folders and torch's distributed checkpoints that are complete or absent on a disk, and what command lines share.

Imports no other package.
"""
