"""The last module that the server of ranks imports: it takes what is loaded out of the garbage collector's sight.

A full collection in a rank would visit the objects of all modules, half a second, and so copy their pages.
"""

import gc

gc.collect()
gc.freeze()
