"""Low-bit operators, exact references, and the choice of a kernel."""
