"""Programs that made the bundled files. They run from a clone: `python -m tools.NAME`."""
