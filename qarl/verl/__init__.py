"""Everything about verl: this package starts a run in verl and watches it. `plugin/` is the part that verl loads."""
