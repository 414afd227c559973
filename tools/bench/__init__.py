"""Commands that measure time or memory, beside that of another program."""
