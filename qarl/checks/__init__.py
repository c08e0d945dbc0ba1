"""What would go wrong with a run, found before it starts: the local trainer, verl and the doctor call these checks."""
