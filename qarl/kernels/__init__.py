"""Low-bit operators: which serves a layer, and their exact references. Imports nothing of the other subpackages."""
