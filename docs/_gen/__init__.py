"""What docs/generate.py is made of. Nothing here is part of the package."""
