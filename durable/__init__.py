"""Files, folders and torch's distributed checkpoints that are complete or absent on a disk, what command lines share, and
the report of a job that hangs.

Imports no other package.
"""
