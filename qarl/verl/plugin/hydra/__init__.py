"""Hydra groups. `'hydra.searchpath=[pkg://qarl.verl.plugin.hydra]'` on verl's own command line makes them available."""
