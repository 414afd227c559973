"""Commands that write a page of `docs/`."""
