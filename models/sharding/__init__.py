"""Models over the devices of a mesh: how layers are divided, and where arrays lie."""
