"""python -m docs.generate; build.py explains its flags."""

import gc

from docs.generate.build import main

gc.disable()  # it lives for seconds, and collections of the planner's many objects take a fifth of them
main()
