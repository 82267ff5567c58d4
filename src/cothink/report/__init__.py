"""What a run looks like to a reader: the static page (`page`) and the local viewer (`app`), from the same pieces."""
