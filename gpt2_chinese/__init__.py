"""The model, the corpus, the vocabulary and the run that every chapter shares. Knows no parallelism.

Importing the package imports nothing heavy: a wrong flag must be answered before torch is loaded.
"""

__version__ = "0.1.0"
