"""What all readers use: files of a directory, and the error for bad checkpoints."""
