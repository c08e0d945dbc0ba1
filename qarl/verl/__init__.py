"""All of verl: how a run is handed to it and watched, and in `plugin/` what verl itself loads."""
