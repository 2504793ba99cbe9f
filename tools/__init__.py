"""Programs that made the bundled files; `python -m tools.NAME` runs them in a clone."""
