"""Everything about verl: this package hands a run to verl and watches it; `plugin/` is the part that verl loads."""
