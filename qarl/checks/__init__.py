"""Checks of a run before it starts. The local trainer, verl and the doctor make the same checks."""
