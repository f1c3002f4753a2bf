"""python -m docs.generate; build.py says what its flags do."""

from docs.generate.build import main

main()
