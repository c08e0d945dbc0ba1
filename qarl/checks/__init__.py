"""Checks of a run before it starts. The local trainer, verl and the doctor call the same ones."""
