"""Imports what the ranks need to judge the chapters' own code, before they are forked."""

from tests.exercises.solutions import SOLUTIONS

for make in SOLUTIONS.values():
    make()
