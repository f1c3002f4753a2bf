"""python -m docs.generate; build.py explains its flags."""

from docs.generate.build import main

main()
