"""Hydra groups for verl's own command line: `'hydra.searchpath=[pkg://qarl.verl.plugin.hydra]'`."""
