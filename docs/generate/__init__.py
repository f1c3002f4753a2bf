"""Makes what the pages include: python -m docs.generate writes docs/_generated/."""
