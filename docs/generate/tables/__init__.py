"""Tables and references that the repository's own functions and docstrings give."""
