"""The site; generate/ makes what its pages include."""
